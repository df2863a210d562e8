"""The order of documents: a shuffle of each epoch by seed, and turns of the parts of a mixture.

    one part     0 ... n-1 in the order of the epoch, epoch after epoch
    several      the part that is furthest behind its share of tokens gives the next document

Every part goes through its epochs by itself. Shares are counted in the tokens that were put into
packs. All of it follows from the seed and a few integers, which are the state.

Lengths of the next documents of stored tokens are looked up many at a time (`KnownAhead`). A
look-up changes nothing: where a stream is follows from its order alone, and a chunk that does not
hold that place is made anew. So it is no part of a state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from packgraph.train.config.reading import shown
from packgraph.train.data.source import StoredSource

LARGEST = 2**53  # of any count in a state
COUNTS = ("epoch", "position", "usable_in_epoch", "tokens")
LOOKED_UP = 4096  # documents of one look-up, which takes about 0.1 µs each


@dataclass(frozen=True)
class SourcePart:
    """Consecutive documents of a source, and the weight of their tokens in a mixture."""

    documents: int
    weight: float = 1.0


@runtime_checkable
class WeightedSource(Protocol):
    """A source of several parts, in their order."""

    @property
    def parts(self) -> Sequence[SourcePart]:
        """The parts, which have all documents of the source."""


class OrderPlace(NamedTuple):
    """A place in the order: of which part, in which of its epochs, where in that, and the index in
    the source of the document that stands there."""

    part: int
    epoch: int
    position: int
    document: int


def is_count(value: Any, limit: int) -> bool:
    """Tells whether a value of a state is a whole number from 0 to `limit`."""
    return type(value) is int and 0 <= value <= limit


class PartOrder:
    """Position in one part of a source.

    Attributes:
        part: The part.
        epoch: Passes over it that are done.
        position: In the order of this epoch.
        usable: Documents that were packed in it.
        tokens: Of documents that were packed, in all epochs; of a mixture only.
    """

    def __init__(self, part: SourcePart, number: int, first: int, seed: Sequence[int]) -> None:
        """number: of this part. first: index of its first document in the source. seed: of its
        shuffles, with the epoch behind it."""
        self.part, self._number, self._first, self._seed = part, number, first, seed
        self.load([0, 0, 0, 0])

    def counts(self) -> list[int]:
        """Its state, as COUNTS."""
        return [self.epoch, self.position, self.usable, self.tokens]

    def load(self, counts: Sequence[int]) -> None:
        """Go on where `counts` were taken."""
        self.epoch, self.position, self.usable, self.tokens = counts
        self._order = self._shuffled(self.epoch)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """Indexes in the source in the order of an epoch."""
        seed = [self._seed[0], epoch, *self._seed[1:]]
        return np.random.default_rng(seed).permutation(self.part.documents) + self._first

    @property
    def place(self) -> OrderPlace:
        """The place of the document whose turn it is."""
        document = self._order.item(self.position)
        return OrderPlace(self._number, self.epoch, self.position, document)

    def coming(self, epochs: int | None) -> Iterator[OrderPlace]:
        """The places from here on, whatever happens to this order; endless where `epochs` is
        None."""
        epoch, start, order = self.epoch, self.position, self._order
        while self.part.documents and (epochs is None or epoch < epochs):
            for position in range(start, self.part.documents):
                yield OrderPlace(self._number, epoch, position, order.item(position))
            epoch, start = epoch + 1, 0
            order = self._shuffled(epoch)

    def upcoming(self, most: int) -> NDArray[np.int64]:
        """Indexes in the source of the next documents of the epoch, at most so many."""
        return self._order[self.position : self.position + most]


class DocumentOrder:
    """Order in which documents come, over all parts of a source.

    Attributes:
        turn: The part that gives the next document.
        is_single: There is one part only.
    """

    def __init__(self, parts: Sequence[SourcePart], seed: int, epochs: int | None) -> None:
        """epochs: passes over the source, which has one part then; None = endless."""
        self._epochs, self._parts = epochs, list[PartOrder]()
        self.is_single = len(parts) == 1
        first = 0
        for number, part in enumerate(parts):
            own = [seed] if self.is_single else [seed, number]
            self._parts.append(PartOrder(part, number, first, own))
            first += part.documents
        self._choose()

    def _choose(self) -> None:
        self.turn = min(self._parts, key=lambda one: one.tokens / one.part.weight)

    @property
    def is_at_end(self) -> bool:
        """True if the part whose turn it is has come to the end of its epoch."""
        return self.turn.position == self.turn.part.documents

    @property
    def is_over(self) -> bool:
        """True if all epochs are over."""
        return self._epochs is not None and self.turn.epoch >= self._epochs

    def coming(self) -> list[Iterator[OrderPlace]]:
        """For each part the places that come from here on. In a mixture the turns of the parts
        follow from tokens that nobody has counted yet; the order within each does not."""
        return [part.coming(self._epochs) for part in self._parts]

    def shares(self) -> list[float]:
        """Weight of each part, of all together."""
        total = sum(one.part.weight for one in self._parts)
        return [one.part.weight / total for one in self._parts]

    def begin_epoch(self) -> None:
        """Shuffle the part whose turn it is anew."""
        self.turn.load([self.turn.epoch + 1, 0, 0, self.turn.tokens])

    def advance(self, usable: int, tokens: int, documents: int = 1) -> None:
        """So many documents, of one part, are done with: they gave `usable` for packing, of
        `tokens` tokens."""
        turn = self.turn
        turn.position, turn.usable = turn.position + documents, turn.usable + usable
        if not self.is_single:
            turn.tokens += tokens
            self._choose()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; of one part its counts by name, of several a list for each."""
        parts = [part.counts() for part in self._parts]
        return dict(zip(COUNTS[:3], parts[0], strict=False)) if self.is_single else {"parts": parts}

    def _counts_in(self, state: Mapping[str, Any]) -> Any:
        """The counts of each part in a state."""
        return [[*(state[name] for name in COUNTS[:3]), 0]] if self.is_single else state["parts"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; it was found to be undamaged."""
        for part, counts in zip(self._parts, self._counts_in(state), strict=True):
            part.load(counts)
        self._choose()

    def damage(self, state: Mapping[str, Any], *, bounded: bool) -> list[str]:
        """Lists what is wrong with a state. bounded: positions are of these parts."""
        parts = self._counts_in(state)
        is_list = isinstance(parts, list) and (not bounded or len(parts) == len(self._parts))
        if not is_list or not all(
            isinstance(counts, list) and len(counts) == len(COUNTS) for counts in parts
        ):
            return [f"its parts are {shown(parts)}"]
        return [
            f"its {name} is {shown(value)}" if self.is_single else f"its parts are {shown(parts)}"
            for own, counts in zip(self._parts, parts, strict=False)
            for name, value in zip(COUNTS, counts, strict=True)
            if not is_count(
                value, own.part.documents if bounded and name == "position" else LARGEST
            )
        ]


class Upcoming(NamedTuple):
    """Documents that come next: by their indexes in the source, with tokens and loss tokens."""

    indexes: list[int]
    lengths: list[int]
    loss_tokens: list[int]


class KnownAhead:
    """The next documents of `order`, out of a source of stored ones."""

    def __init__(self, source: StoredSource, order: DocumentOrder, longest: int) -> None:
        """longest: tokens of a document that is packed as it is."""
        self._source, self._order, self._longest = source, order, longest
        # By part: its epoch, the position of the first document, and documents.
        self._chunks: dict[int, tuple[int, int, Upcoming]] = {}

    def run(self, most: int) -> Upcoming:
        """At most so many documents from the place of the order on, as far as each is one document
        that is packed whole; none where the first is not. Of a mixture one at a time."""
        part, epoch, position, _ = self._order.turn.place
        known, begin, chunk = self._chunks.get(part, (-1, 0, None))
        if chunk is None or known != epoch or not 0 <= position - begin < len(chunk.indexes):
            indexes = self._order.turn.upcoming(LOOKED_UP)
            lengths, loss_tokens = self._source.lengths(indexes)
            fits = (lengths <= self._longest) & (loss_tokens > 0)
            chunk = Upcoming(indexes.tolist(), (lengths * fits).tolist(), loss_tokens.tolist())
            begin, self._chunks[part] = position, (epoch, position, chunk)
        start = position - begin
        piece = slice(start, start + (most if self._order.is_single else 1))
        if 0 in (whole := chunk.lengths[piece]):
            piece = slice(start, start + whole.index(0))
        return Upcoming(*(column[piece] for column in chunk))
