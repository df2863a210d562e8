"""Tokens to experts over memory that ranks read from each other: exactly the rows that are routed,
and no host.

    preprocess   all-gather of the chosen experts --> every rank knows the row of every pair       moe/peer_read/api.py
    dispatch     publish tokens and weights, pull each token that has rows here into all of them   moe/peer_read/api.py
    combine      publish rows, pull each token's k rows and sum them

A rank has room for R rows, `factor` times the balanced load, however they are spread over the
senders. Where more are routed to a rank, the last of them by expert have no row: every rank knows
all pairs, so all of a group leave out the same ones and see the same overflow. All shapes are
static and nothing waits for the host. What is kept for the backward is the plan, never the common
memory, which the next exchange overwrites.
"""  # noqa: E501

import math

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.dispatch.dispatcher import ExpertAssignment, ExpertRows, Routing
from packgraph.moe.peer_read.api import PeerReadPlan, from_experts, plan_peer_read, to_experts
from packgraph.moe.peer_read.buffers import Buffers, rows_for


class SymmetricDispatcher:
    """An exchange whose sizes stay on the device. group: the ranks that share the experts, in
    order.

    factor: R over the balanced load T * k; `ranks` always suffices. For more room put another
    dispatcher in its place (`with_room`): graphs notice that, and are captured anew with the new
    shapes. buffers: shared by the layers. All ranks must work on the same number of tokens (one
    bucket) at a time.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup | None, factor: float, buffers: Buffers
    ) -> None:
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
        self.buffers = buffers

    @property
    def why_not(self) -> dict[str, str]:
        """Nothing stands against capturing any stage."""
        return {}

    def room(self, pairs: int) -> int:
        """R, the rows of this rank's experts, for T * k = `pairs` routed pairs on every rank."""
        return rows_for(pairs, self.factor, self._sharing.ranks)

    @property
    def most_factor(self) -> float:
        """The factor that always suffices: one rank gets everything."""
        return float(self._sharing.ranks)

    def with_room(self, factor: float, buffers: Buffers) -> "SymmetricDispatcher":
        """The same with another factor and buffers that have room for it. All ranks of the group
        must take the same."""
        return SymmetricDispatcher(self.num_experts, self._group, factor, buffers)

    def preprocess(self, routing: Routing) -> PeerReadPlan:
        """The row of every pair; exchanges the chosen experts. No host sync. Raises ValueError when
        the buffers are too small for so many tokens."""
        pairs = routing.experts.numel()
        room = self.room(pairs)
        if room > self.buffers.rows:
            raise ValueError(
                f"{pairs} routed pairs need symmetric buffers of {room} rows, but these have "
                f"{self.buffers.rows}: make them for the largest bucket and factor"
            )
        return plan_peer_read(
            routing.experts,
            self.num_experts,
            self._sharing.ranks,
            self._sharing.rank,
            room,
            self.buffers.group,
        )

    def dispatch(self, x: Tensor, routing: Routing, plan: PeerReadPlan) -> ExpertRows:
        """x: [T, H]. Returns R rows."""
        values, weights = to_experts(
            x, routing.weights, plan, self.room(routing.weights.numel()), self.buffers
        )
        return ExpertRows(values, weights, plan.offsets)

    def combine(self, rows: Tensor, plan: PeerReadPlan) -> Tensor:
        """rows: [R, H] of the experts, weights applied. Returns [T, H]."""
        return from_experts(rows, plan, self.buffers)

    def overflow(self, plan: PeerReadPlan) -> Tensor:
        """Number of rows beyond R that some rank of the group needs: int64 [], the same on all of
        them."""
        return (plan.needed - self.room(plan.place_of_pair.numel())).clamp(min=0)

    def demand(self, plan: PeerReadPlan) -> Tensor:
        """Factor that would have sufficed where rows were lacking, in thousandths, rounded up; else
        0: int64 []."""
        pairs = plan.place_of_pair.numel()
        return torch.where(self.overflow(plan) > 0, (plan.needed * 1000 + pairs - 1) // pairs, 0)
