"""The order of documents: a shuffle of each epoch by seed, and turns of the parts of a mixture.

    one part     0 ... n-1 in the order of the epoch, epoch after epoch
    several      the part that is furthest behind its share of tokens gives the next document

Every part goes through its epochs by itself. Shares are counted in the tokens that were put into
packs. All of it follows from the seed and a few integers, which are the state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from packgraph.train.config.values import shown

LARGEST = 2**53  # of any count in a state
COUNTS = ("epoch", "position", "usable_in_epoch", "tokens")


@dataclass(frozen=True)
class SourcePart:
    """Consecutive documents of a source, and the weight of their tokens in a mixture."""

    documents: int
    weight: float = 1.0


@runtime_checkable
class WeightedSource(Protocol):
    """A source of several parts, in their order."""

    @property
    def parts(self) -> Sequence[SourcePart]: ...


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
    """Position in one part: its epoch, the place in it, the documents found usable in it, and
    tokens so far."""

    def __init__(self, part: SourcePart, number: int, first: int, seed: Sequence[int]) -> None:
        """number: of this part. first: index of its first document in the source. seed: of its
        shuffles, with the epoch behind it."""
        self.part, self.number, self._first, self._seed = part, number, first, seed
        self.load([0, 0, 0, 0])

    def counts(self) -> list[int]:
        """Its state, as COUNTS."""
        return [self.epoch, self.position, self.usable, self.tokens]

    def load(self, counts: Sequence[int]) -> None:
        """Go on where `counts` were taken."""
        self.epoch, self.position, self.usable, self.tokens = counts
        self._order = self._shuffled(self.epoch)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        seed = [self._seed[0], epoch, *self._seed[1:]]
        found: NDArray[np.int64] = np.random.default_rng(seed).permutation(self.part.documents)
        return found

    @property
    def place(self) -> OrderPlace:
        """The place of the document whose turn it is."""
        return self._place(self.epoch, self.position, self._order)

    def coming(self, epochs: int | None) -> Iterator[OrderPlace]:
        """The places from here on, whatever happens to this order; endless where `epochs` is
        None."""
        return self._from(self.epoch, self.position, self._order, epochs)

    def _from(
        self, epoch: int, start: int, order: NDArray[np.int64], epochs: int | None
    ) -> Iterator[OrderPlace]:
        while self.part.documents and (epochs is None or epoch < epochs):
            for position in range(start, self.part.documents):
                yield self._place(epoch, position, order)
            epoch, start = epoch + 1, 0
            order = self._shuffled(epoch)

    def _place(self, epoch: int, position: int, order: NDArray[np.int64]) -> OrderPlace:
        return OrderPlace(self.number, epoch, position, self._first + int(order[position]))

    def upcoming(self, most: int) -> NDArray[np.int64]:
        """Indexes in the source of the next documents of the epoch, at most so many."""
        return self._order[self.position : self.position + most] + self._first

    @property
    def share(self) -> float:
        """Tokens so far over the weight."""
        return self.tokens / self.part.weight


class DocumentOrder:
    """Order in which documents come, over all parts of a source."""

    def __init__(self, parts: Sequence[SourcePart], seed: int, epochs: int | None) -> None:
        """epochs: passes over the source, which has one part then; None = endless."""
        self._epochs, self._parts = epochs, list[PartOrder]()
        first = 0
        for number, part in enumerate(parts):
            own = [seed, number] if len(parts) > 1 else [seed]
            self._parts.append(PartOrder(part, number, first, own))
            first += part.documents
        self._choose()

    def _choose(self) -> None:
        self._turn = min(self._parts, key=lambda part: part.share)

    @property
    def documents(self) -> int:
        """Documents of the part whose turn it is."""
        return self._turn.part.documents

    @property
    def usable(self) -> int:
        """Documents for packing that the part whose turn it is gave in its epoch."""
        return self._turn.usable

    @property
    def is_at_end(self) -> bool:
        """True if the part whose turn it is has come to the end of its epoch."""
        return self._turn.position == self.documents

    @property
    def is_over(self) -> bool:
        """True if all epochs are over."""
        return self._epochs is not None and self._turn.epoch >= self._epochs

    @property
    def place(self) -> OrderPlace:
        """The place of the document whose turn it is."""
        return self._turn.place

    def coming(self) -> list[Iterator[OrderPlace]]:
        """For each part the places that come from here on. In a mixture the turns of the parts
        follow from tokens that nobody has counted yet; the order within each does not."""
        return [part.coming(self._epochs) for part in self._parts]

    def shares(self) -> list[float]:
        """Weight of each part, of all together."""
        total = sum(part.part.weight for part in self._parts)
        return [part.part.weight / total for part in self._parts]

    @property
    def is_single(self) -> bool:
        """True if there is one part only."""
        return len(self._parts) == 1

    def upcoming(self, most: int) -> NDArray[np.int64]:
        """Indexes in the source of the next documents of the part whose turn it is, at most so many
        and within its epoch."""
        return self._turn.upcoming(most)

    def begin_epoch(self) -> None:
        """Shuffle the part whose turn it is anew."""
        self._turn.load([self._turn.epoch + 1, 0, 0, self._turn.tokens])

    def advance(self, usable: int, tokens: int, documents: int = 1) -> None:
        """So many documents, of one part, are done with: they gave `usable` for packing, of
        `tokens` tokens."""
        turn = self._turn
        turn.position, turn.usable = turn.position + documents, turn.usable + usable
        if not self.is_single:
            turn.tokens += tokens
            self._choose()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; of one part its counts by name, of several a list for each."""
        if len(self._parts) == 1:
            return dict(zip(COUNTS[:3], self._parts[0].counts()[:3], strict=True))
        return {"parts": [part.counts() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; it was found to be undamaged."""
        if len(self._parts) == 1:
            self._parts[0].load([*(state[name] for name in COUNTS[:3]), 0])
        else:
            for part, counts in zip(self._parts, state["parts"], strict=True):
                part.load(counts)
        self._choose()

    def damage(self, state: Mapping[str, Any], *, bounded: bool) -> list[str]:
        """Lists what is wrong with a state. bounded: positions are of these parts."""
        if len(self._parts) == 1:
            found = [(name, state[name], self.documents) for name in COUNTS[:3]]
            return [
                f"its {name} is {shown(value)}"
                for name, value, documents in found
                if not is_count(value, documents if bounded and name == "position" else LARGEST)
            ]
        parts = state["parts"]
        good = isinstance(parts, list) and (not bounded or len(parts) == len(self._parts))
        for number, counts in enumerate(parts if good else ()):
            limits = [LARGEST] * len(COUNTS)
            if bounded:
                limits[1] = self._parts[number].part.documents
            good = good and isinstance(counts, list) and len(counts) == len(COUNTS)
            good = good and all(map(is_count, counts, limits))
        return [] if good else [f"its parts are {shown(parts)}"]
