"""Choice of a few capacities that graphs are captured for, from the lengths of the documents.

Every row is padded to the smallest bucket that holds it, in tokens and in documents. A bucket costs
memory and time for capture, padding costs time in every step, and a place for a document costs
about as much as some tokens (an attention kernel starts work for documents that might be there).
What rows come out is decided by the packer, and the packer goes by the buckets: so every proposal
is judged by really packing a sample of the lengths.

    histogram ─▶ sample ─▶ packer, largest bucket only ─▶ fills ─▶ best sets (sets.py) ──────────┐
                   │                                                                             ├─▶ packer ─▶ cheapest
                   └─ batches ─▶ sizes with close sums (sets.py) ─▶ packer ─▶ best sets ─────────┘    └─▶ pruned

The largest bucket always has `max_tokens` tokens, so that every document that may come fits; rare
rows go to the next larger bucket. The same arguments give the same plan. Nothing here touches a
device.

`packgraph.plan_buckets` takes the few numbers that users know, `choose_buckets` a `BucketRequest`
with all. Within a memory budget buckets are dropped first, and tokens only where one bucket alone is too
large.
"""  # noqa: E501

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from packgraph.packing.buckets.cost import GIBIBYTE, CostModel, LinearMemory, PoolBytes
from packgraph.packing.buckets.lengths import (
    LengthHistogram,
    Overlong,
    PackedRows,
    PackingPolicy,
    pack_sample,
)
from packgraph.packing.buckets.sets import (
    Corner,
    Fills,
    Grid,
    best_set,
    cost_of,
    covering_sizes,
    grid_of,
)
from packgraph.packing.capacity import Capacity

# Caps on the documents of a row are tried at these shares of the rows; what a cap costs in padding
# the packer shows.
CAPS = (1.0, 0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.6)
PRUNED_AGAIN = 2
PLACES = CostModel(microbatch_us=0, token_us=1, document_us=0, tile_us=0, attention_us=0)
SEED = 0


@dataclass(frozen=True, kw_only=True)
class BucketRequest:
    """Request for a set of buckets.

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


def within_budget(request: BucketRequest) -> tuple[int, int, tuple[str, ...]]:
    """Tokens of the largest bucket and the number of buckets within the memory budget, and what was
    dropped for it. Raises ValueError when there is none.

    A slot's pool is as large as its largest bucket needs, whatever the others; every bucket has
    graphs of its own. What is dropped first are buckets, and tokens only where one alone is too
    large: documents must fit.
    """
    multiple, most = request.multiple, request.max_buckets
    wanted = -(-request.max_tokens // multiple) * multiple
    if request.budget is None:
        return wanted, most, ()
    room = request.budget // request.slots
    allowed = _gib(room) + (f" for each of {request.slots} slots" if request.slots > 1 else "")

    def needed(tokens: int, buckets: int) -> int:
        return request.pool_bytes(Capacity(tokens, tokens)) + buckets * request.graph_bytes

    if fitting := [count for count in range(1, most + 1) if needed(wanted, count) <= room]:
        note = (
            f"{fitting[-1]} instead of {most} buckets: {_gib(needed(wanted, most))} would be "
            f"needed ({_gib(request.graph_bytes)} a bucket beside the pool of the largest), the "
            f"budget is {allowed}"
        )
        return wanted, fitting[-1], () if fitting[-1] == most else (note,)
    for buckets in range(most, 0, -1):
        sizes = range(multiple, wanted, multiple)
        if tokens := max((size for size in sizes if needed(size, buckets) <= room), default=0):
            note = (
                f"buckets of more than {tokens} tokens are dropped: one of {wanted} needs "
                f"{_gib(needed(wanted, buckets))} with all graphs, the budget is {allowed}"
            )
            return tokens, buckets, (note,)
    raise ValueError(
        f"the memory budget of {allowed} holds no bucket: one of {multiple} tokens needs "
        f"{_gib(needed(multiple, 1))}; allow more, or use fewer slots"
    )


def _gib(number: int) -> str:
    return f"{number / GIBIBYTE:.2f} GiB"


class Judge:
    """Says what buckets cost by packing a sample into them."""

    def __init__(self, lengths: Sequence[int], request: BucketRequest) -> None:
        self.lengths, self.request = lengths, request
        self._known: dict[tuple[Corner, ...], Fills] = {}

    def fills(self, corners: Sequence[Corner]) -> Fills:
        """The rows of the sample. Those of a stream follow from the largest bucket alone: no other
        has more room."""
        key = tuple(corners) if self.request.policy.batches else (max(corners),)
        if key not in self._known:
            capacities = [Capacity(*corner) for corner in key]
            self._known[key] = pack_sample(self.lengths, capacities, self.request.policy).all_fills
        return self._known[key]

    def cost(self, corners: Sequence[Corner]) -> float:
        """Microseconds of the sample's rows; without attention proper, which does not depend on
        them."""
        return cost_of(corners, self.fills(corners), self.request.cost)

    def pruned(self, corners: tuple[Corner, ...]) -> tuple[Corner, ...]:
        """`corners` without those that save too little, neither time nor places; never without the
        largest.

        Places count too, where the model says that they cost nothing: a model of costs may be wrong
        about a machine.
        """
        costs = (self.request.cost, PLACES)
        limits = [
            cost_of(corners, self.fills(corners), cost) * (1 + self.request.worth) for cost in costs
        ]

        def growth(rest: tuple[Corner, ...], fills: Fills) -> float:
            return max(cost_of(rest, fills, cost) / limit for cost, limit in zip(costs, limits))

        while len(corners) > 1:
            rests = [corners[:index] + corners[index + 1 :] for index in range(len(corners) - 1)]
            # Packed again are only those that would grow least if the rows stayed as they are.
            fills = self.fills(corners)
            rests = sorted(rests, key=lambda rest: growth(rest, fills))[:PRUNED_AGAIN]
            least, rest = min((growth(rest, self.fills(rest)), rest) for rest in rests)
            if least > 1:
                break
            corners = rest
        return corners


def stream_proposals(judge: Judge, top_tokens: int, most: int) -> Iterator[tuple[Corner, ...]]:
    """Sets of at most `most` corners, the largest of `top_tokens` tokens; at least one: the best
    set for each cap on the documents of a row."""
    request, natural = judge.request, judge.fills([(top_tokens, top_tokens)])
    counts = sorted(documents for (_, documents), rows in natural.items() for _ in range(rows))
    last = len(counts) - 1
    for cap in sorted(
        {counts[min(last, int(share * len(counts)))] for share in CAPS}, reverse=True
    ):
        top = (top_tokens, cap)
        fills = judge.fills([top])
        yield best_set(fills, grid_of(fills, top, request.multiple), request.cost, most).corners


def batch_proposals(judge: Judge, top_tokens: int, most: int) -> Iterator[tuple[Corner, ...]]:
    """The same of rows that are packed a batch at a time: the best set for rows as the largest
    bucket alone gives them, and for each number of sizes with close sums."""
    request, each = judge.request, judge.request.policy.documents
    fills = judge.fills([(top_tokens, top_tokens)])
    documents = max(documents for _, documents in fills)
    grid = grid_of(fills, (top_tokens, documents), request.multiple)
    yield best_set(fills, grid, request.cost, most).corners
    batches = [
        sum(judge.lengths[start : start + each]) for start in range(0, len(judge.lengths), each)
    ]
    for count in range(2, most + 1):
        sizes = covering_sizes(batches, top_tokens, count, request.multiple)
        fills = judge.fills([(size, documents) for size in sizes])
        top = (top_tokens, max(documents for _, documents in fills))
        grid = Grid(sizes, grid_of(fills, top, request.multiple).documents)
        yield best_set(fills, grid, request.cost, most).corners


@dataclass(frozen=True)
class BucketPlan:
    """The chosen buckets.

    capacities: smallest first. sample, alone: what packing the sample into them gave, and into the
    largest only. pool_bytes: of one slot, for each capacity (a slot's pool is as large as its
    largest, not the sum). notes: what was dropped or left out, and why.
    """

    request: BucketRequest
    capacities: tuple[Capacity, ...]
    sample: PackedRows
    alone: PackedRows
    pool_bytes: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """Predicted bytes of pools and graphs of all slots."""
        return self.request.slots * (
            max(self.pool_bytes) + self.request.graph_bytes * len(self.capacities)
        )

    @property
    def capture_seconds(self) -> float:
        """Predicted time of capturing every bucket in every slot."""
        request = self.request
        return (
            request.slots
            * len(self.capacities)
            * request.layers
            * request.cost.capture_layer_seconds
        )


def choose_buckets(histogram: LengthHistogram, request: BucketRequest) -> BucketPlan:
    """The buckets for documents of these lengths. Raises ValueError when there are no documents,
    when they are too long (and may be neither split nor dropped), or when no bucket at all is
    within the budget.
    """
    if not histogram.documents:
        raise ValueError("buckets follow from the lengths of documents, and there is no document")
    (most_tokens, most, notes), policy = within_budget(request), request.policy
    packed = histogram.within(most_tokens, policy.overlong)
    if not packed.documents:
        raise ValueError(
            f"all documents have more than {most_tokens} tokens and are dropped; allow larger "
            "buckets, or "
            "split what is too long"
        )
    if count := histogram.longer_than(most_tokens):
        notes += (
            f"{count} of {histogram.documents} documents have more than {most_tokens} tokens, the "
            f"longest {histogram.longest}; they are "
            f"{'split' if policy.overlong == 'split' else 'dropped'}",
        )
    lengths = packed.draw(policy.sample_size(most_tokens, packed.mean), SEED)
    judge = Judge(lengths, request)
    corners = min(
        (batch_proposals if policy.batches else stream_proposals)(judge, most_tokens, most),
        key=lambda found: (judge.cost(found), len(found)),
    )
    capacities = tuple(Capacity(*corner) for corner in judge.pruned(corners))
    return BucketPlan(
        request,
        capacities,
        pack_sample(lengths, capacities, policy),
        pack_sample(lengths, capacities[-1:], policy),
        tuple(request.pool_bytes(capacity) for capacity in capacities),
        notes,
    )


def measure(
    capacities: Sequence[Capacity], lengths: Sequence[int], policy: PackingPolicy
) -> PackedRows:
    """Really pack `lengths` into `capacities`, such as those of documents that a plan has not seen.

    What is too long is handled as `policy.overlong` says; raises ValueError when that is an error.
    """
    longest = max(capacity.bound for capacity in capacities)
    if max(lengths, default=0) > longest:
        whole = LengthHistogram.of(lengths).within(longest, policy.overlong)
        lengths = whole.draw(whole.documents, SEED)
    return pack_sample(lengths, capacities, policy)


def plan_buckets(
    lengths: Iterable[int],
    *,
    max_tokens: int = 8192,
    max_buckets: int = 8,
    window: int = 256,
    overlong: Overlong = "error",
) -> list[Capacity]:
    """Chooses the few capacities that graphs are captured for.

    A sample of the lengths is packed into every proposal; padding, empty places for documents and
    launches of further microbatches cost time, by a model that was measured on an H200. The same
    arguments give the same capacities.

    Args:
        lengths: Tokens of each document, such as those of the training data or a sample of it.
        max_tokens: Tokens of the largest capacity.
        max_buckets: Maximum number of capacities.
        window: Number of documents that wait to be combined, as in `packgraph.pack_stream`.
        overlong: What becomes of documents longer than `max_tokens`: `error`, `split` or `drop`.

    Returns:
        Capacities for `packgraph.pack_stream` and `packgraph.graph`, the smallest first.

    Raises:
        ValueError: If there are no documents, one is too long and `overlong` is `error`, or a
            number is out of range.

    Examples:
        >>> capacities = packgraph.plan_buckets([30, 50, 200] * 100, max_tokens=256, max_buckets=2)
        >>> capacities[-1].tokens, len(capacities) <= 2
        (256, True)
    """
    request = BucketRequest(
        policy=PackingPolicy(documents=window, overlong=overlong),
        max_tokens=max_tokens,
        max_buckets=max_buckets,
    )
    return list(choose_buckets(LengthHistogram.of(lengths), request).capacities)
