"""Requests to dynamic context parallelism (ranks, their token budget, legal group sizes and places
for documents), and the cost of one packed row for the ranks that share it.

W = 8 ranks, L tokens each        a group of c ranks is an aligned block of c consecutive ranks
0 1 2 3 4 5 6 7                   and runs one row of at most c·L tokens:
[      4      ][  2  ][1][1]      one microstep

The cost of a row is time by its static shape and by the documents in it (`ContextCost`).

A row of a group of c ranks has c·L places for tokens, L on each rank, used or not. Under ulysses
every rank holds L tokens outside attention and all c·L tokens of 1/c of the heads inside, so each
part of the cost is the same on all c ranks, and attention, cut by heads, adds up to the same work
whatever c is. Only the exchange of heads is added by c.

Where a row is cut in zigzag a rank has all heads of two parts of every document, so attention adds
up to the same work again; but a place for a document is two on every rank, whatever c is, and keys
and values of all c·L tokens come, which costs the more, the larger the group:

               leaves or comes to a rank          places for documents        collectives of a layer
    ulysses    L (c - 1) / c tokens, all vectors  N, with 1 / c of the heads  4
    zigzag     L (c - 1) tokens, keys and values  2 N, with all heads         2
"""

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from packgraph.packing.buckets.cost import TILE, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import powers_of_two

# Qwen3-0.6B, as CostModel's own figures: 28 layers exchange queries and outputs of 16 heads, keys
# and values of 8, of 128 numbers in bf16, forward and backward: 688 KB a token, at 237 GB/s a rank
# (NCCL all-to-all over NVLink, 4 GPUs). Two exchanges a layer and direction of about 20 µs each,
# however little they carry. Both until a run measures its own.
EXCHANGE_US, GROUP_US = 2.9, 2240.0
# Its keys and values alone, gathered forward and their gradients sent back: 229 KB a token, and
# 0.13 µs for bringing them into order in device memory.
GATHER_US = 1.1
ZIGZAG_COLLECTIVES = 0.5  # of those of ulysses
PLACES = (16, 64, 256)


@dataclass(frozen=True, kw_only=True)
class ContextCost:
    """Microseconds of forward and backward of one packed row, on each rank of its group of c ranks
    with L tokens each.

    microbatch_us: whatever the row. group_us: more than that for c > 1 (latency of collectives;
    half in zigzag). token_us: for each of the L places for a token. exchange_us: for each of the L
    · (c - 1) / c tokens that leave the rank under ulysses. gather_us: for each of the L · (c - 1)
    tokens of others, whose keys and values come in zigzag. attention_us: for each pair of tokens of
    a document, over c. document_us: for each place for a document, over c; in zigzag twice that on
    every rank. tile_us: for each place for a document and each TILE of the L tokens. zigzag: the
    sizes whose rows are cut so. Raises ValueError for negative numbers and a free token.
    """

    microbatch_us: float
    token_us: float
    attention_us: float
    group_us: float = GROUP_US
    exchange_us: float = EXCHANGE_US
    document_us: float = 0.0
    tile_us: float = 0.0
    gather_us: float = GATHER_US
    zigzag: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = [name for name in COEFFICIENTS if not getattr(self, name) >= 0]
        if wrong or not self.token_us:
            raise ValueError(
                f"ContextCost: {', '.join(wrong or ['token_us'])} must be positive numbers (others "
                "than "
                "token_us may be 0)"
            )

    @classmethod
    def of(
        cls,
        cost: CostModel,
        *,
        exchange_us: float = EXCHANGE_US,
        group_us: float = GROUP_US,
        gather_us: float = GATHER_US,
        zigzag: tuple[int, ...] = (),
    ) -> "ContextCost":
        """The cost of rows on one rank, measured or estimated, with estimates for what groups
        add."""
        return cls(
            microbatch_us=cost.microbatch_us,
            token_us=cost.token_us,
            attention_us=cost.attention_us,
            document_us=cost.document_us,
            tile_us=cost.tile_us,
            exchange_us=exchange_us,
            group_us=group_us,
            gather_us=gather_us,
            zigzag=zigzag,
        )

    def row_us(self, size: int, tokens: int, places: int, pairs: float) -> float:
        """A row of `size` ranks with `tokens` places for tokens on each and `places` for documents.

        pairs: sum of the squares of the lengths of its documents.
        """
        counts = self.counts(size, tokens, places, pairs)
        return sum((getattr(self, name) * count for name, count in counts.items()), start=0.0)

    def place_us(self, size: int, tokens: int) -> float:
        """A place for a document."""
        counts = self.counts(size, tokens, 1, 0.0)
        return self.document_us * counts["document_us"] + self.tile_us * counts["tile_us"]

    def pair_us(self, size: int) -> float:
        """A pair of tokens of one document."""
        return self.attention_us / size

    def counts(self, size: int, tokens: int, places: int, pairs: float) -> dict[str, float]:
        """Times that such a row pays each coefficient."""
        shared, zigzag = size > 1, size > 1 and size in self.zigzag
        return {
            "microbatch_us": 1.0,
            "token_us": tokens,
            "attention_us": pairs / size,
            "group_us": (ZIGZAG_COLLECTIVES if zigzag else 1.0) if shared else 0.0,
            "exchange_us": 0.0 if zigzag else tokens * (size - 1) / size,
            "gather_us": tokens * (size - 1) if zigzag else 0.0,
            "document_us": places * (2.0 if zigzag else 1 / size),
            "tile_us": places * tokens / TILE,
        }


COEFFICIENTS = tuple(field.name for field in fields(ContextCost) if field.name != "zigzag")


@dataclass(frozen=True)
class RowTiming:
    """A measured row: ranks that shared it, places for tokens on each, places for documents, sum of
    squares, time."""

    size: int
    tokens: int
    places: int
    pairs: float
    us: float


def fit(timings: Sequence[RowTiming], prior: ContextCost, weight: float = 1e-3) -> ContextCost:
    """The coefficients of `prior` moved to where they explain `timings` best, by least squares of
    relative errors.

    Rows of one L alone cannot tell a token's time from a microbatch's. So each coefficient is
    pulled towards its prior by `weight` (ridge regression, in shares of the prior); what the data
    says outweighs it, and what it does not say stays in proportion. A coefficient whose prior is 0
    stays 0, and none becomes negative (active set: the most negative one is held at 0, and the
    others are solved again). Raises ValueError without timings or for times of 0.
    """
    if not timings or any(not timing.us > 0 for timing in timings):
        raise ValueError(f"fit: needs measured times above 0 µs, got {len(timings)} timings")
    names = [name for name in COEFFICIENTS if getattr(prior, name) > 0]
    counts = [
        prior.counts(timing.size, timing.tokens, timing.places, timing.pairs) for timing in timings
    ]
    columns = {
        name: [
            getattr(prior, name) * count[name] / timing.us for count, timing in zip(counts, timings)
        ]
        for name in names
    }
    while True:
        matrix = [
            [sum(a * b for a, b in zip(columns[one], columns[other])) for other in names]
            for one in names
        ]
        right = [sum(columns[name]) + weight for name in names]
        for place, row in enumerate(matrix):
            row[place] += weight
        shares = dict(zip(names, _solve(matrix, right)))
        worst = min(shares, key=lambda name: shares[name])
        if shares[worst] >= 0:
            break
        names.remove(worst)
    return replace(
        prior, **{name: shares.get(name, 0.0) * getattr(prior, name) for name in COEFFICIENTS}
    )


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by Gauss-Jordan elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for place, row in enumerate(rows):
            if place != column:
                factor = row[column] / rows[column][column]
                rows[place] = [one - factor * other for one, other in zip(row, rows[column])]
    return [row[-1] / row[place] for place, row in enumerate(rows)]


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    """The ground of a plan. Raises ValueError with all reasons when it makes no sense.

    world: ranks W of one pipeline stage and tensor rank (dp x cp). tokens: budget L of one rank per
    microbatch. sizes: legal sizes of groups, divisors of W, of which the smallest must divide all
    (default: the powers of two that divide W). places: how many documents a row may have places
    for, any of them at any size; each (size, places) is a bucket and so a variant of the graphs.
    microsteps: most microbatches of the step; documents that find no room wait for the next one
    (default: as many microbatches as it takes).
    """

    world: int
    tokens: int
    sizes: tuple[int, ...] = ()
    places: tuple[int, ...] = PLACES
    microsteps: int | None = None
    cost: ContextCost = field(default_factory=lambda: ContextCost.of(CostModel()))

    def __post_init__(self) -> None:
        errors = [
            f"{name} must be at least {least}, got {value}"
            for name, value, least in (
                ("world", self.world, 1),
                ("tokens", self.tokens, 1),
                ("microsteps", 1 if self.microsteps is None else self.microsteps, 1),
            )
            if value < least
        ]
        sizes = tuple(sorted(set(self.sizes) if self.sizes else powers_of_two(max(self.world, 1))))
        errors += [
            f"sizes: {size} does not divide the {self.world} ranks"
            for size in sizes
            if size < 1 or self.world % size
        ]
        if not errors:
            errors += [
                f"sizes: the smallest, {sizes[0]}, must divide all others, for ranks without "
                "documents run in "
                f"groups of that size, and it does not divide {size}"
                for size in sizes
                if size % sizes[0]
            ]
        if not self.places or min(self.places) < 1:
            errors.append(
                f"places for documents must be whole numbers of at least 1, got {list(self.places)}"
            )
        if errors:
            raise ValueError("dynamic context parallelism: " + "; ".join(errors))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "places", tuple(sorted(set(self.places))))

    @property
    def longest(self) -> int:
        """Tokens of the longest document that fits."""
        return self.sizes[-1] * self.tokens

    def needed(self, length: int, sizes: Sequence[int] = ()) -> int:
        """The smallest size, of `sizes` or of all legal ones, that holds `length` tokens."""
        return next(size for size in sizes or self.sizes if size * self.tokens >= length)

    def places_for(self, documents: int) -> int:
        """The fewest places that a row of so many documents may have."""
        return self.places[bisect_left(self.places, documents)]

    def bucket(self, size: int, documents: int) -> Capacity:
        """The capacity of the row of a group."""
        return Capacity(size * self.tokens, self.places_for(documents))

    def read(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """`lengths` as plain ints. Raises ValueError for a document that has no tokens or fits no
        group."""
        found = tuple(map(operator.index, lengths))
        for place, length in enumerate(found):
            if length < 1:
                raise ValueError(f"document {place} has {length} tokens: leave empty documents out")
            if length > self.longest:
                raise ValueError(
                    f"document {place} has {length:,} tokens, and the largest group holds "
                    f"{self.longest:,} "
                    f"({self.sizes[-1]} ranks x {self.tokens:,}): cut it, give ranks more tokens, "
                    "or allow larger "
                    f"groups (sizes; the world has {self.world} ranks)"
                )
        return found

    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Every longest choice of sizes that divide one another, ascending: one for powers of two.

        Blocks of such sizes are nested. A rank that runs its large groups before its small ones
        then waits for nobody until the end of the step: whoever shares a group with it has run the
        same groups before.
        """
        return tuple(self._extended((self.sizes[0],)))

    def _extended(self, chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        following = [size for size in self.sizes if size > chain[-1] and size % chain[-1] == 0]
        nearest = [
            size
            for size in following
            if not any(size % other == 0 for other in following if other < size)
        ]
        if not nearest:
            yield chain
        for size in nearest:
            yield from self._extended((*chain, size))
