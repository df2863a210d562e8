"""Tokens to experts by all-to-alls of exactly the rows that are routed: the classic, for which the
host must wait.

    preprocess   counts [ranks, experts] --all-to-all--> counts of the others --host--> sizes of
                 everything after
    dispatch     rows by expert --all-to-all, those sizes--> rows from all ranks --> rows by expert
    combine      the same in the other direction, then the sum of each token's rows

Nothing can overflow, no row is padding: this is what the static dispatchers are measured against
and tested with. The shapes of dispatch, experts and combine follow from the data, so none of them
can be captured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from packgraph.moe.dispatch.assignment import ExpertAssignment
from packgraph.moe.dispatch.dispatcher import ExpertRows, Routing
from packgraph.moe.dispatch.exchange import exchange
from packgraph.moe.permute.api import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows
from packgraph.moe.permute.segments import before, count_rows, place_segments

SYNCS = (
    "the host reads how many rows each rank sends and receives, and waits for the device; "
    "use the padded or the symmetric dispatcher"
)
SHAPES = (
    "its shapes are the numbers of rows that were routed, which the host has read in "
    "moe_preprocess; "
    "use the padded or the symmetric dispatcher"
)


class HostSplitsPlan(NamedTuple):
    """departures: pairs and rows that leave. arrivals: places that rows arrive at, and rows by
    expert.

    send, receive: rows to and from each rank, host ints. Both maps have as many rows as their sum,
    but at least one.
    """

    departures: RowPlan
    arrivals: RowPlan
    send: tuple[int, ...]
    receive: tuple[int, ...]


class HostSplitsDispatcher:
    """An all-to-all of what is routed. group: the ranks that share the experts, in order; None =
    this process."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None) -> None:
        """Raises ValueError when the ranks cannot share the experts equally."""
        self._sharing, self._group = ExpertAssignment.over(num_experts, group), group
        self.num_experts, self.first, self.count = (
            num_experts,
            self._sharing.first,
            self._sharing.count,
        )

    @property
    def why_not(self) -> dict[str, str]:
        """Why each stage from moe_preprocess on cannot be captured."""
        return {"moe_preprocess": SYNCS} | dict.fromkeys(
            ("moe_dispatch", "moe_experts", "moe_combine"), SHAPES
        )

    def preprocess(self, routing: Routing) -> HostSplitsPlan:
        """Exchange and read the counts. The host waits for the device."""
        departures = plan_rows(routing.experts, self.num_experts, routing.experts.numel())
        counts = count_rows(departures.offsets).view(self._sharing.ranks, self.count)
        (arriving,) = exchange((counts,), self._group)
        send, receive = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
        sent, received = (max(1, sum(rows)) for rows in (send, receive))
        starts = before(arriving.flatten()).view_as(arriving)
        return HostSplitsPlan(
            departures._replace(pair_of_row=departures.pair_of_row[:sent]),
            place_segments(arriving, starts, received, received),
            tuple(send),
            tuple(receive),
        )

    def dispatch(self, x: Tensor, routing: Routing, plan: HostSplitsPlan) -> ExpertRows:
        """x: [T, H]. Returns the rows that were received, all of them live, or an empty one."""
        leaving = (
            gather_rows(x, plan.departures),
            gather_pairs(routing.weights, plan.departures)[:, None],
        )
        values, weights = self._exchange(leaving, plan.send, plan.receive)
        rows, factors = gather_rows(values, plan.arrivals), gather_pairs(weights, plan.arrivals)
        return ExpertRows(rows, factors, plan.arrivals.offsets)

    def combine(self, rows: Tensor, plan: HostSplitsPlan) -> Tensor:
        """rows: [received, H] of the experts, weights applied. Returns [T, H]."""
        (back,) = self._exchange((combine_rows(rows, plan.arrivals),), plan.receive, plan.send)
        return combine_rows(back, plan.departures)

    def overflow(self, plan: HostSplitsPlan) -> Tensor:
        """Rows that were needed and not there: int64 [], always 0 here."""
        return torch.zeros_like(plan.departures.needed)

    def demand(self, plan: HostSplitsPlan) -> None:
        """Nothing can be lacking."""

    def _exchange(
        self, tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]
    ) -> list[Tensor]:
        """Exchange tensors [rows, width]. Where there is no row, one of zeros stands for none:
        kernels need one."""
        given = [tensor if sum(send) else tensor[:0] for tensor in tensors]
        taken = exchange(given, self._group, send, receive)
        return [tensor if sum(receive) else F.pad(tensor, (0, 0, 0, 1)) for tensor in taken]
