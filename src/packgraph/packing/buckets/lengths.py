"""Lengths of documents, and the rows that packing documents of such lengths gives.

The order of documents does not matter: training draws it at random, so lengths in a row are
independent draws. A sample of them is packed as the packer will pack documents: that is what
buckets are chosen for, and what decides between them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packgraph.packing.bins import pack_lengths
from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.buckets.sets import Corner, Fills, tight_cost
from packgraph.packing.capacity import Capacity, CapacitySet

Overlong = Literal["error", "split", "drop"]


@dataclass(frozen=True)
class LengthHistogram:
    """Number of documents of each length. lengths: in tokens, ascending, each at least 1; counts:
    at least 1 each.

    Raises ValueError for anything else.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(one < other for one, other in zip(self.lengths, self.lengths[1:]))
        if (
            len(self.lengths) != len(self.counts)
            or not ascending
            or min((*self.lengths, *self.counts), default=1) < 1
        ):
            raise ValueError(
                "LengthHistogram: lengths must ascend from 1 and have a count of at least 1 each"
            )

    @staticmethod
    def of(lengths: Iterable[int]) -> "LengthHistogram":
        """The histogram of a stream of lengths in tokens; empty documents are left out. Reads the
        stream once."""
        found = Counter(int(length) for length in lengths)
        found.pop(0, None)
        return LengthHistogram(
            tuple(sorted(found)), tuple(found[length] for length in sorted(found))
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(length * count for length, count in zip(self.lengths, self.counts))

    @property
    def mean(self) -> float:
        """Tokens of a document on average; 0 when there is none."""
        return self.tokens / max(1, self.documents)

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 when there is none."""
        return self.lengths[-1] if self.lengths else 0

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the documents does not exceed; 0 when
        there is none."""
        sums = np.cumsum(self.counts)
        if not len(sums):
            return 0
        return self.lengths[min(int(np.searchsorted(sums, share * sums[-1])), len(sums) - 1)]

    def longer_than(self, limit: int) -> int:
        """Number of documents of more than `limit` tokens."""
        return sum(count for length, count in zip(self.lengths, self.counts) if length > limit)

    def within(self, limit: int, overlong: Overlong) -> "LengthHistogram":
        """The documents as the packer sees them when capacities take at most `limit` tokens of one
        document.

        Raises ValueError for longer documents when `overlong` is error.
        """
        found: Counter[int] = Counter()
        for length, count in zip(self.lengths, self.counts):
            if length <= limit:
                found[length] += count
            elif overlong == "error":
                raise ValueError(
                    f"{self.longer_than(limit)} of {self.documents} documents have more than "
                    f"{limit} "
                    f"tokens, the longest {self.longest}; allow larger buckets, or split or drop "
                    "what is "
                    "too long"
                )
            elif overlong == "split":
                found[limit] += length // limit * count
                found[length % limit] += count
        found.pop(0, None)
        return LengthHistogram(
            tuple(sorted(found)), tuple(found[length] for length in sorted(found))
        )

    def draw(self, count: int, seed: int) -> list[int]:
        """`count` lengths drawn independently, the same for the same arguments. Raises ValueError
        when empty."""
        if not self.lengths:
            raise ValueError("there are no documents to draw from")
        shares = np.array(self.counts) / self.documents
        return [
            int(length)
            for length in np.random.default_rng(seed).choice(self.lengths, size=count, p=shares)
        ]


@dataclass(frozen=True, kw_only=True)
class PackingPolicy:
    """Settings of how documents are combined into rows. documents: how many wait at most to be
    combined (`pack_stream`, the trainer's `data.window`), or with `batches`: how many are packed at
    a time with none left waiting (`pack`, for every step). overlong: what becomes of a document
    longer than every capacity."""

    documents: int = 256
    batches: bool = False
    overlong: Overlong = "error"

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ValueError(f"PackingPolicy: documents must be at least 1, got {self.documents}")

    def sample_size(self, tokens: int, mean: float) -> int:
        """Documents of `mean` tokens whose packs of `tokens` tokens show what this policy does."""
        if self.batches:
            return max(32, min(500, 16_384 // self.documents)) * self.documents
        return 4 * self.documents + max(4000, min(100_000, int(2000 * tokens / mean)))


@dataclass(frozen=True)
class PackedRows:
    """Rows that packing a sample gave: for each capacity its rows by tokens and documents. pairs: Σ
    length² over documents, for the cost of attention."""

    fills: tuple[tuple[Capacity, Fills], ...]
    pairs: int

    @property
    def all_fills(self) -> Counter[Corner]:
        """Rows by tokens and documents, whatever their capacity."""
        return sum((Counter(fills) for _, fills in self.fills), Counter())

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(sum(fills.values()) for _, fills in self.fills)

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(tokens * rows for _, fills in self.fills for (tokens, _), rows in fills.items())

    @property
    def places(self) -> int:
        """Places for tokens in all rows."""
        return sum(capacity.tokens * sum(fills.values()) for capacity, fills in self.fills)

    @property
    def padding(self) -> float:
        """Share of the places that hold no token."""
        return 1 - self.tokens / self.places if self.places else 0.0

    def cost_us(self, cost: CostModel) -> float:
        """Microseconds of all rows."""
        shapes = sum(
            float(cost.shape_us(capacity.tokens, capacity.documents)) * sum(fills.values())
            for capacity, fills in self.fills
        )
        return shapes + cost.attention_us * self.pairs

    def above_bound(self, cost: CostModel) -> float:
        """Share by which the rows cost more than in shapes of their own without padding, which no
        buckets can beat."""
        bound = tight_cost(self.all_fills, cost) + cost.attention_us * self.pairs
        return self.cost_us(cost) / bound - 1 if self.rows else 0.0


def pack_sample(
    lengths: Sequence[int], capacities: Iterable[Capacity], policy: PackingPolicy
) -> PackedRows:
    """Pack documents of `lengths`, each within the capacities, by `policy`.

    Of a stream only the rows made before its documents ended count: a run is long, and its end is
    one row.
    """
    allowed = CapacitySet(capacities)
    found: dict[Capacity, Counter[Corner]] = {capacity: Counter() for capacity in allowed.sorted}
    pairs = 0
    for members, tokens, capacity in _rows(lengths, allowed, policy):
        found[capacity][tokens, len(members)] += 1
        pairs += sum(length * length for length in members)
    return PackedRows(tuple(found.items()), pairs)


def _rows(
    lengths: Sequence[int], allowed: CapacitySet, policy: PackingPolicy
) -> Iterator[tuple[list[int], int, Capacity]]:
    """Rows, as lengths of documents, their sum and capacity: of batch after batch, or of a stream
    before it ended; all rows of a stream that ends before its window is full."""
    size = policy.documents if policy.batches else max(len(lengths), 1)
    ended, may_end = False, not policy.batches and len(lengths) >= policy.documents

    def read(batch: Sequence[int]) -> Iterator[int]:
        nonlocal ended
        yield from batch
        ended = may_end

    window = None if policy.batches else policy.documents
    for start in range(0, len(lengths), size):
        batch = lengths[start : start + size]
        for pack in pack_lengths(read(batch), allowed, window=window):
            if ended:
                return
            yield [batch[member] for member in pack.members], pack.tokens, pack.capacity(allowed)
