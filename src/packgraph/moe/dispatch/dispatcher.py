"""Dispatchers that move tokens to the ranks and rows of their experts and back, behind one
protocol.

    routed tokens --preprocess--> plan --dispatch--> rows by expert --(experts)--> rows --combine-->
    tokens

    local         all experts are here; nothing is sent, nothing can overflow                 static, no sync
    host_splits   an all-to-all of exactly what is routed, whose sizes the host reads         syncs in preprocess
    padded        an all-to-all of a fixed number of rows per pair of ranks                   static, no sync
    symmetric     ranks read what is routed from each other's memory                          static, no sync

A plan is a pytree of tensors and constants that travels in the state from stage to stage. Between
dispatch and combine a rank holds `ExpertRows`.

Experts of a layer are shared in equal parts in order (`ExpertAssignment`): expert e is on rank
e // (E / ranks).
"""  # noqa: E501

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.permute import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows


@dataclass(frozen=True)
class ExpertAssignment:
    """num_experts: of the layer. ranks: that share them; rank: of this process among them."""

    num_experts: int
    ranks: int
    rank: int

    @staticmethod
    def over(num_experts: int, group: dist.ProcessGroup | None) -> "ExpertAssignment":
        """The experts of a layer shared by the ranks of `group`; None = this process has all.
        Raises ValueError."""
        ranks, rank = (
            (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        )
        if problem := assignment_problem(num_experts, ranks):
            raise ValueError(problem)
        return ExpertAssignment(num_experts, ranks, rank)

    @property
    def count(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.ranks

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.count


def assignment_problem(num_experts: int, ranks: int) -> str | None:
    """Returns why `ranks` ranks cannot share the experts of a layer, None where they can."""
    if num_experts % ranks == 0:
        return None
    return (
        f"{num_experts} experts cannot be shared equally by {ranks} ranks: parallel.ep must divide "
        "their number"
    )


class Routing(NamedTuple):
    """Routing of tokens to experts. experts: int32 [T, k], -1 for padding. weights: float32 [T, k],
    0 for padding."""

    experts: Tensor
    weights: Tensor


class ExpertRows(NamedTuple):
    """Input of this rank's experts, rows by expert. values: [R, H]. weights: float32 [R]. offsets:
    int32 [its experts].

    Rows from offsets[-1] on are zero here, and undefined in whatever experts make of them.
    """

    values: Tensor
    weights: Tensor
    offsets: Tensor


class Dispatcher(Protocol):
    """One layer's way of moving tokens. num_experts: of the layer over all ranks; first, count:
    those of this rank.

    why_not: by stage name, why a stage cannot be captured: the host waits in it; empty where every
    shape follows from T alone. overflow: rows that were lacking, int64 []. demand: the factor that
    would have sufficed, in thousandths, 0 where nothing was lacking; None where nothing ever is.
    """

    num_experts: int
    first: int
    count: int

    @property
    def why_not(self) -> dict[str, str]: ...

    def preprocess(self, routing: Routing) -> Any: ...

    def dispatch(self, x: Tensor, routing: Routing, plan: Any) -> ExpertRows: ...

    def combine(self, rows: Tensor, plan: Any) -> Tensor: ...

    def overflow(self, plan: Any) -> Tensor: ...

    def demand(self, plan: Any) -> Tensor | None: ...


class LocalDispatcher:
    """All experts are on this rank: T * k rows always suffice."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.first, self.count = num_experts, 0, num_experts

    @property
    def why_not(self) -> dict[str, str]:
        """Nothing stands against capturing any stage."""
        return {}

    def preprocess(self, routing: Routing) -> RowPlan:
        """The plan of rows; no host sync."""
        return plan_rows(routing.experts, self.num_experts, routing.experts.numel())

    def dispatch(self, x: Tensor, routing: Routing, plan: RowPlan) -> ExpertRows:
        """x: [T, H]."""
        return ExpertRows(gather_rows(x, plan), gather_pairs(routing.weights, plan), plan.offsets)

    def combine(self, rows: Tensor, plan: RowPlan) -> Tensor:
        """rows: [R, H] of the experts, weights applied. Returns [T, H]."""
        return combine_rows(rows, plan)

    def overflow(self, plan: RowPlan) -> Tensor:
        """Rows that were needed and not there: int64 [], always 0 here."""
        return torch.zeros_like(plan.needed)

    def demand(self, plan: RowPlan) -> None:
        """Nothing can be lacking."""
