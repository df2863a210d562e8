"""What one packed row costs the ranks that share it: time by its static shape and by the documents in it.

A row of a group of c ranks has c·L places for tokens, L on each rank, used or not. Under ulysses every rank holds L
tokens outside attention and all c·L tokens of 1/c of the heads inside, so each part of the cost is the same on all c
ranks, and attention, cut by heads, adds up to the same work whatever c is. Only the exchange of heads is added by c.
"""
from collections.abc import Sequence
from dataclasses import dataclass, fields

from packgraph.plan.buckets.cost import TILE, CostModel

# Qwen3-0.6B, as CostModel's own figures: 28 layers exchange queries and outputs of 16 heads, keys and values of 8, of
# 128 numbers in bf16, forward and backward: 688 KB a token, at 237 GB/s a rank (NCCL all-to-all over NVLink, 4 GPUs).
# Two exchanges a layer and direction of about 20 µs each, however little they carry. Both until a run measures its own.
EXCHANGE_US, GROUP_US = 2.9, 2240.0


@dataclass(frozen=True, kw_only=True)
class ContextCost:
    """Microseconds of forward and backward of one packed row, on each rank of its group of c ranks with L tokens each.

    microbatch_us: whatever the row. group_us: more than that for c > 1 (latency of collectives). token_us: for each of
    the L places for a token. exchange_us: for each of the L · (c - 1) / c tokens that leave the rank. attention_us: for
    each pair of tokens of a document, over c. document_us: for each place for a document, over c. tile_us: for each
    place for a document and each TILE of the L tokens. Raises ValueError for negative numbers and a free token.
    """

    microbatch_us: float
    token_us: float
    attention_us: float
    group_us: float = GROUP_US
    exchange_us: float = EXCHANGE_US
    document_us: float = 0.0
    tile_us: float = 0.0

    def __post_init__(self) -> None:
        wrong = [name for name, value in self.__dict__.items() if not value >= 0]
        if wrong or not self.token_us:
            raise ValueError(f"ContextCost: {', '.join(wrong or ['token_us'])} must be positive numbers (others than "
                             "token_us may be 0)")

    @classmethod
    def of(cls, cost: CostModel, *, exchange_us: float = EXCHANGE_US, group_us: float = GROUP_US) -> "ContextCost":
        """The cost of rows on one rank, measured or estimated, with estimates for what groups add."""
        return cls(microbatch_us=cost.microbatch_us, token_us=cost.token_us, attention_us=cost.attention_us,
                   document_us=cost.document_us, tile_us=cost.tile_us, exchange_us=exchange_us, group_us=group_us)

    def row_us(self, size: int, tokens: int, places: int, pairs: float) -> float:
        """A row of `size` ranks with `tokens` places for tokens on each and `places` for documents.

        pairs: sum of the squares of the lengths of its documents.
        """
        return self.base_us(size, tokens) + self.place_us(size, tokens) * places + self.pair_us(size) * pairs

    def base_us(self, size: int, tokens: int) -> float:
        """What does not depend on documents."""
        shared = self.group_us + self.exchange_us * tokens * (size - 1) / size if size > 1 else 0.0
        return self.microbatch_us + self.token_us * tokens + shared

    def place_us(self, size: int, tokens: int) -> float:
        """A place for a document."""
        return self.document_us / size + self.tile_us * tokens / TILE

    def pair_us(self, size: int) -> float:
        """A pair of tokens of one document."""
        return self.attention_us / size


@dataclass(frozen=True)
class RowTiming:
    """A measured row: ranks that shared it, places for tokens on each, places for documents, sum of squares, time."""

    size: int
    tokens: int
    places: int
    pairs: float
    us: float


def fit(timings: Sequence[RowTiming], prior: ContextCost, weight: float = 1e-3) -> ContextCost:
    """The coefficients of `prior` moved to where they explain `timings` best, by least squares of relative errors.

    Rows of one L alone cannot tell a token's time from a microbatch's. So each coefficient is pulled towards its prior
    by `weight` (ridge regression, in shares of the prior); what the data says outweighs it, and what it does not say
    stays in proportion. A coefficient whose prior is 0 stays 0, and none becomes negative (active set: the most
    negative one is held at 0, and the others are solved again). Raises ValueError without timings or for times of 0.
    """
    if not timings or any(not timing.us > 0 for timing in timings):
        raise ValueError(f"fit: needs measured times above 0 µs, got {len(timings)} timings")
    names = [field.name for field in fields(ContextCost) if getattr(prior, field.name) > 0]
    columns = {name: [_alone(prior, name, timing) / timing.us for timing in timings] for name in names}
    while True:
        matrix = [[sum(a * b for a, b in zip(columns[one], columns[other])) for other in names] for one in names]
        right = [sum(columns[name]) + weight for name in names]
        for place, row in enumerate(matrix):
            row[place] += weight
        shares = dict(zip(names, _solve(matrix, right)))
        worst = min(shares, key=lambda name: shares[name])
        if shares[worst] >= 0:
            break
        names.remove(worst)
    found = {field.name: shares.get(field.name, 0.0) * getattr(prior, field.name) for field in fields(ContextCost)}
    return ContextCost(**found)


def _alone(prior: ContextCost, name: str, timing: RowTiming) -> float:
    """What `name` adds to the row under `prior`."""
    return getattr(prior, name) * _counts(timing)[name]


def _counts(timing: RowTiming) -> dict[str, float]:
    """How often a row pays each coefficient."""
    size, tokens = timing.size, timing.tokens
    return {"microbatch_us": 1, "token_us": tokens, "attention_us": timing.pairs / size, "group_us": float(size > 1),
            "exchange_us": tokens * (size - 1) / size, "document_us": timing.places / size,
            "tile_us": timing.places * tokens / TILE}


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
