"""Which few capacities graphs are captured for, from the lengths of the documents.

Every row is padded to the smallest bucket that holds it, in tokens and in documents. A bucket costs
memory and time for capture, padding costs time in every step, and a place for a document costs
about as much as some tokens (an attention kernel starts work for documents that might be there).
What rows come out is decided by the packer, and the packer goes by the buckets: so every proposal
is judged by really packing a sample of the lengths.

    histogram ─▶ sample ─▶ packer, largest bucket only ─▶ fills ─▶ best sets (bucket_sets.py)   ─┐
                   │                                                                             ├─▶ packer ─▶ cheapest
                   └─ batches ─▶ sizes with close sums (bucket_cover.py) ─▶ packer ─▶ best sets ─┘    └─▶ pruned

The largest bucket always has `max_tokens` tokens, so that every document that may come fits; rare
rows go to the next larger bucket. The same arguments give the same plan. Nothing here touches a
device.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass

from packgraph.packing.buckets.lengths import LengthHistogram
from packgraph.packing.buckets.packing import PackedRows, PackingPolicy, pack_sample
from packgraph.packing.buckets.proposals import Judge, proposals
from packgraph.packing.buckets.request import BucketRequest, within_budget
from packgraph.packing.capacity import Capacity

SEED = 0


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

    @property
    def above_bound(self) -> float:
        """By what share rows cost more than in shapes of their own without any padding."""
        return self.sample.above_bound(self.request.cost)


def choose_buckets(histogram: LengthHistogram, request: BucketRequest) -> BucketPlan:
    """The buckets for documents of these lengths. Raises ValueError when there are no documents,
    when they are too long (and may be neither split nor dropped), or when no bucket at all is
    within the budget.
    """
    if not histogram.documents:
        raise ValueError("buckets follow from the lengths of documents, and there is no document")
    room, policy = within_budget(request), request.policy
    packed = histogram.within(room.tokens, policy.overlong)
    if not packed.documents:
        raise ValueError(
            f"all documents have more than {room.tokens} tokens and are dropped; allow larger "
            "buckets, or "
            "split what is too long"
        )
    lengths = packed.draw(policy.sample_size(room.tokens, packed.mean), SEED)
    judge = Judge(lengths, request)
    corners = min(
        proposals(judge, room.tokens, room.buckets),
        key=lambda found: (judge.cost(found), len(found)),
    )
    capacities = tuple(Capacity(*corner) for corner in judge.pruned(corners))
    return BucketPlan(
        request,
        capacities,
        pack_sample(lengths, capacities, policy),
        pack_sample(lengths, capacities[-1:], policy),
        tuple(request.pool_bytes(capacity) for capacity in capacities),
        room.notes + _overlong_note(histogram, room.tokens, policy),
    )


def _overlong_note(
    histogram: LengthHistogram, tokens: int, policy: PackingPolicy
) -> tuple[str, ...]:
    count = histogram.longer_than(tokens)
    if not count:
        return ()
    return (
        f"{count} of {histogram.documents} documents have more than {tokens} tokens, the longest "
        f"{histogram.longest}; they are {'split' if policy.overlong == 'split' else 'dropped'}",
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
