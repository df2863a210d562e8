"""Packing lengths as the packer will pack documents: what buckets are chosen for, and what decides
between them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.buckets.lengths import Overlong
from packgraph.packing.buckets.sets import Corner, Fills, tight_cost
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.waiting import pack_lengths


@dataclass(frozen=True, kw_only=True)
class PackingPolicy:
    """How documents come together. documents: how many wait at most to be combined (`pack_stream`,
    the trainer's `data.window`), or with `batches`: how many are packed at a time with none left
    waiting (`pack`, for every step). overlong: what becomes of a document longer than every
    capacity.
    """

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
    """What packing a sample gave: for each capacity its rows by tokens and documents. pairs: Σ
    length² over documents, for the cost of attention.
    """

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
        """By what share the rows cost more than in shapes of their own without padding, which no
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
    packs = (
        _batches(lengths, allowed, policy.documents)
        if policy.batches
        else _steady(lengths, allowed, policy)
    )
    for members, tokens, capacity in packs:
        found[capacity][tokens, len(members)] += 1
        pairs += sum(length * length for length in members)
    return PackedRows(tuple(found.items()), pairs)


Row = tuple[list[int], int, Capacity]  # lengths of its documents, their sum, its capacity


def _batches(lengths: Sequence[int], allowed: CapacitySet, documents: int) -> Iterator[Row]:
    for start in range(0, len(lengths), documents):
        batch = lengths[start : start + documents]
        for pack in pack_lengths(batch, allowed, window=None):
            yield [batch[member] for member in pack.members], pack.tokens, pack.capacity(allowed)


def _steady(lengths: Sequence[int], allowed: CapacitySet, policy: PackingPolicy) -> Iterator[Row]:
    """The rows of a stream before it ended; all rows of one that ends before its window is full."""
    ended = False

    def stream() -> Iterator[int]:
        nonlocal ended
        yield from lengths
        ended = len(lengths) >= policy.documents

    for pack in pack_lengths(stream(), allowed, window=policy.documents):
        if ended:
            return
        yield [lengths[member] for member in pack.members], pack.tokens, pack.capacity(allowed)
