"""What buckets are asked for, and what a memory budget leaves of that."""

from collections.abc import Callable
from dataclasses import dataclass, field

from packgraph.packing.buckets.cost import GIBIBYTE, CostModel, LinearMemory, PoolBytes
from packgraph.packing.buckets.packing import PackingPolicy
from packgraph.packing.capacity import Capacity


@dataclass(frozen=True, kw_only=True)
class BucketRequest:
    """What buckets are wanted.

    policy: how documents are packed. max_tokens: tokens of the largest bucket, and so of the
    longest document. max_buckets: how many at most. multiple: tokens of a bucket are a multiple of
    it. cost, pool_bytes: models of time and of a slot's pool; graph_bytes: device memory of one
    bucket's graphs beside the pool (about 10 kB a kernel). budget: bytes for all slots, None = no
    limit. slots: microbatches in flight. layers: that are captured. worth: share of the cost or of
    the places for tokens that a bucket must save, else it is left out. Raises ValueError that names
    every number that makes no sense.
    """

    policy: PackingPolicy = field(default_factory=PackingPolicy)
    max_tokens: int = 8192
    max_buckets: int = 8
    multiple: int = 64
    cost: CostModel = field(default_factory=CostModel)
    pool_bytes: PoolBytes = field(default_factory=LinearMemory)
    graph_bytes: int = 21_000_000
    budget: int | None = None
    slots: int = 1
    layers: int = 28
    worth: float = 1e-3

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least 1, got {value}"
            for name in ("max_tokens", "max_buckets", "multiple", "slots", "layers")
            if (value := getattr(self, name)) < 1
        ]
        wrong += [
            f"{name} must not be negative, got {value}"
            for name in ("graph_bytes", "worth")
            if (value := getattr(self, name)) < 0
        ]
        if wrong:
            raise ValueError("BucketRequest: " + "; ".join(wrong))


@dataclass(frozen=True)
class BucketBudget:
    """What the budget allows. tokens: of the largest bucket; buckets: how many; notes: what was
    dropped for it."""

    tokens: int
    buckets: int
    notes: tuple[str, ...]


def within_budget(request: BucketRequest) -> BucketBudget:
    """The largest bucket and the number of buckets within the memory budget. Raises ValueError when
    there is none.

    A slot's pool is as large as its largest bucket needs, whatever the others; every bucket has
    graphs of its own. What is dropped first are buckets, and tokens only where one alone is too
    large: documents must fit.
    """
    multiple = request.multiple
    wanted = -(-request.max_tokens // multiple) * multiple
    if request.budget is None:
        return BucketBudget(wanted, request.max_buckets, ())
    room = request.budget // request.slots
    allowed = _gib(room) + (f" for each of {request.slots} slots" if request.slots > 1 else "")

    def needed(tokens: int, buckets: int) -> int:
        return request.pool_bytes(Capacity(tokens, tokens)) + buckets * request.graph_bytes

    if needed(wanted, 1) > room:
        return _smaller(request, wanted, room, allowed, needed)
    buckets = max(
        count
        for count in range(1, request.max_buckets + 1)
        if count == 1 or needed(wanted, count) <= room
    )
    if buckets == request.max_buckets:
        return BucketBudget(wanted, buckets, ())
    return BucketBudget(
        wanted,
        buckets,
        (
            f"{buckets} instead of {request.max_buckets} buckets: "
            f"{_gib(needed(wanted, request.max_buckets))} would be "
            f"needed ({_gib(request.graph_bytes)} a bucket beside the pool of the largest), the "
            f"budget is {allowed}",
        ),
    )


def _smaller(
    request: BucketRequest, wanted: int, room: int, allowed: str, needed: Callable[[int, int], int]
) -> BucketBudget:
    """The room where a bucket of `wanted` tokens does not fit: smaller ones, as many as asked for
    if there is a way."""
    sizes = range(request.multiple, wanted, request.multiple)
    for buckets in range(request.max_buckets, 0, -1):
        fitting = max((tokens for tokens in sizes if needed(tokens, buckets) <= room), default=0)
        if fitting:
            return BucketBudget(
                fitting,
                buckets,
                (
                    f"buckets of more than {fitting} tokens are dropped: one of {wanted} needs "
                    f"{_gib(needed(wanted, buckets))} with all graphs, the budget is {allowed}",
                ),
            )
    raise ValueError(
        f"the memory budget of {allowed} holds no bucket: one of {request.multiple} tokens needs "
        f"{_gib(needed(request.multiple, 1))}; allow more, or use fewer slots"
    )


def _gib(number: int) -> str:
    return f"{number / GIBIBYTE:.2f} GiB"
