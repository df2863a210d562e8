"""Tokens to experts by all-to-alls of a fixed number of rows per pair of ranks: static, on any
backend.

    send buffer of a rank     |e0 e0 e1 .|e2 e3 e3 e3|      C = 4 places for each of 2 ranks, by
                                                            expert, then empty
    received by rank 1        |e2 e3 e3 e3|e2 e2 . .|       C places from each rank, with the ends
                                                            of its experts
    rows by expert            |e2 e2 e2|e3 e3 e3| . .|      R = ranks * C rows

C follows from the number of tokens alone: `factor` times what each rank would get if experts were
equally busy. Pairs beyond it are an overflow: they have no place, send nothing, get nothing back,
and the plan counts what was needed. All shapes are static and nothing waits for the host, so every
stage can be captured. All ranks of the group must work on the same number of tokens (one bucket) at
a time, since C follows from it.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.dispatch.assignment import ExpertAssignment
from packgraph.moe.dispatch.dispatcher import ExpertRows, Routing
from packgraph.moe.dispatch.exchange import exchange
from packgraph.moe.permute.api import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows
from packgraph.moe.permute.segments import before, place_segments

MULTIPLE = 8  # rows: 16 bytes of bfloat16 per column, what grouped products like


class PaddedPlan(NamedTuple):
    """departures: pairs and places of the send buffer. arrivals: places of the receive buffer and
    rows by expert.

    Both buffers have ranks * C places. needed: int64 [], the most rows that this rank has for one
    rank.
    """

    departures: RowPlan
    arrivals: RowPlan
    needed: Tensor


class PaddedDispatcher:
    """An all-to-all of C places per pair of ranks. group: the ranks that share the experts; None =
    this process.

    factor: C over the balanced load T * k / ranks; `ranks` always suffices. For more room put
        another dispatcher in its
    place (`with_factor`): graphs notice that, and are captured anew with the new shapes.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None, factor: float) -> None:
        """Raises ValueError when the ranks cannot share the experts equally, or for a factor below
        1."""
        if not (math.isfinite(factor) and factor >= 1):
            raise ValueError(
                f"a factor of {factor} leaves less room than a balanced load needs: give 1 or more"
            )
        self._sharing, self._group, self.factor = (
            ExpertAssignment.over(num_experts, group),
            group,
            factor,
        )
        self.num_experts, self.first, self.count = (
            num_experts,
            self._sharing.first,
            self._sharing.count,
        )

    @property
    def why_not(self) -> dict[str, str]:
        """Nothing stands against capturing any stage."""
        return {}

    def room(self, pairs: int) -> int:
        """C, the places for rows from one rank to another, for T * k = `pairs` routed pairs."""
        return _rounded(min(math.ceil(pairs * self.factor / self._sharing.ranks), pairs))

    @property
    def most_factor(self) -> float:
        """The factor that always suffices: one rank gets everything."""
        return float(self._sharing.ranks)

    def with_factor(self, factor: float) -> "PaddedDispatcher":
        """The same with another factor. All ranks of the group must take the same."""
        return PaddedDispatcher(self.num_experts, self._group, factor)

    def preprocess(self, routing: Routing) -> PaddedPlan:
        """The plan of both buffers; exchanges the ends of experts. No host sync."""
        ranks, room = self._sharing.ranks, self.room(routing.experts.numel())
        ordered = plan_rows(routing.experts, self.num_experts, routing.experts.numel())
        departures, ends, needed = _depart(routing.experts, ordered, ranks, room)
        (arriving,) = exchange((ends,), self._group)
        counts = torch.diff(arriving, dim=1, prepend=arriving.new_zeros(ranks, 1))
        starts = before(counts) + torch.arange(0, ranks * room, room, device=ends.device)[:, None]
        return PaddedPlan(
            departures, place_segments(counts, starts, ranks * room, ranks * room), needed
        )

    def dispatch(self, x: Tensor, routing: Routing, plan: PaddedPlan) -> ExpertRows:
        """x: [T, H]. Returns ranks * C rows."""
        leaving = gather_rows(x, plan.departures), gather_pairs(routing.weights, plan.departures)
        values, weights = exchange(leaving, self._group)
        return ExpertRows(
            gather_rows(values, plan.arrivals),
            gather_pairs(weights[:, None], plan.arrivals),
            plan.arrivals.offsets,
        )

    def combine(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        """rows: [ranks * C, H] of the experts, weights applied. Returns [T, H]."""
        (back,) = exchange((combine_rows(rows, plan.arrivals),), self._group)
        return combine_rows(back, plan.departures)

    def overflow(self, plan: PaddedPlan) -> Tensor:
        """How many rows more than C this rank has for some rank: int64 [], 0 = every routed pair
        has its row."""
        return (plan.needed - plan.departures.pair_of_row.numel() // self._sharing.ranks).clamp(
            min=0
        )

    def demand(self, plan: PaddedPlan) -> Tensor:
        """Where rows were lacking the factor that would have sufficed, in thousandths, rounded up;
        else 0: int64 []."""
        pairs = plan.departures.row_of_pair.numel()
        wanted = (plan.needed * (1000 * self._sharing.ranks) + pairs - 1) // pairs
        return torch.where(self.overflow(plan) > 0, wanted, 0)


def _depart(
    experts: Tensor, ordered: RowPlan, ranks: int, room: int
) -> tuple[RowPlan, Tensor, Tensor]:
    """Places of the send buffer, the end of each expert within its rank's places, and the most that
    a rank needs.

    ordered: all pairs by expert, so that those for one rank lie side by side. ends: int64 [ranks,
    experts of a rank].
    """
    ends = ordered.offsets.long().view(ranks, -1)
    last = ends[:, -1]
    first = torch.cat((last.new_zeros(1), last[:-1]))
    index = torch.arange(room, device=ends.device)
    row = first[:, None] + index
    pair = ordered.pair_of_row[row.clamp(max=ordered.pair_of_row.numel() - 1)]
    pair_of_place = torch.where(row < last[:, None], pair, -1).flatten()
    rank = experts.clamp(min=0).long() // ends.shape[1]
    within = ordered.row_of_pair - first[rank]
    place_of_pair = torch.where(
        (ordered.row_of_pair >= 0) & (within < room), rank * room + within, -1
    )
    kept = (ends - first[:, None]).clamp(max=room)
    offsets = kept + room * torch.arange(ranks, device=ends.device)[:, None]
    departures = RowPlan(
        pair_of_place, place_of_pair.int(), offsets.flatten().int(), ordered.needed
    )
    return departures, kept, (last - first).amax()


def _rounded(rows: int) -> int:
    return -(-rows // MULTIPLE) * MULTIPLE
