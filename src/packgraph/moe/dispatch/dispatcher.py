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

Experts of a layer are shared in equal parts in order (`own_experts`): expert e is on rank
e // (E / ranks).
"""  # noqa: E501

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.moe.permute import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows


def own_experts(num_experts: int, group: dist.ProcessGroup | None) -> range:
    """This rank's experts of a layer, which the ranks of `group` share; None = this process has
    all. Raises ValueError when the ranks cannot share them equally."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts cannot be shared equally by {ranks} ranks: parallel.ep "
            "must divide their number"
        )
    count = num_experts // ranks
    return range(rank * count, (rank + 1) * count)


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


class Dispatcher(ABC):
    """One layer's way of moving tokens. group: the ranks that share its experts, in order; None =
    this process.

    num_experts: of the layer over all ranks; first, count: those of this rank. ranks: that share
    them. why_not: by stage name, why a stage cannot be captured: the host waits in it; empty where
    every shape follows from T alone.
    """

    why_not: Mapping[str, str] = MappingProxyType({})

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None = None) -> None:
        """Raises ValueError when the ranks cannot share the experts equally."""
        mine = own_experts(num_experts, group)
        self.num_experts, self.group = num_experts, group
        self.first, self.count, self.ranks = mine.start, len(mine), num_experts // len(mine)

    @abstractmethod
    def preprocess(self, routing: Routing) -> Any:
        """Returns the plan."""

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing, plan: Any) -> ExpertRows:
        """Returns the rows of this rank's experts. x: [T, H]."""

    @abstractmethod
    def combine(self, rows: Tensor, plan: Any) -> Tensor:
        """Returns [T, H]. rows: [R, H] of the experts, weights applied."""

    def overflow(self, plan: Any) -> Tensor:
        """Number of rows that were needed and not there: int64 []."""
        return torch.zeros_like(plan.needed)

    def demand(self, plan: Any) -> Tensor | None:
        """Factor that would have sufficed where rows were lacking, in thousandths, rounded up; else
        0: int64 []. None where nothing can be lacking."""
        return None


class LocalDispatcher(Dispatcher):
    """All experts are on this rank: T * k rows always suffice; no host sync."""

    def preprocess(self, routing: Routing) -> RowPlan:
        return plan_rows(routing.experts, self.num_experts, routing.experts.numel())

    def dispatch(self, x: Tensor, routing: Routing, plan: RowPlan) -> ExpertRows:
        return ExpertRows(gather_rows(x, plan), gather_pairs(routing.weights, plan), plan.offsets)

    def combine(self, rows: Tensor, plan: RowPlan) -> Tensor:
        return combine_rows(rows, plan)


class Dispatching(nn.Module):
    """The dispatcher of one layer, local at first, and what was lacking in its dispatches.

    demand: int64 [], 0 or the most room that a dispatch of training would have needed and had not
    (`Dispatcher.demand`). evaluation_demand: the same of calls that are not training (`eval`, or
    without gradients), which no step reads: look at it after an evaluation, since rows without room
    were left out.
    """

    demand: Tensor
    evaluation_demand: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.dispatcher = LocalDispatcher(num_experts)
        for name in ("demand", "evaluation_demand"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher that takes tokens to the experts."""
        return self._dispatcher[0]

    @dispatcher.setter
    def dispatcher(self, dispatcher: Dispatcher) -> None:
        # In a tuple, which graphs look at: they have baked its shapes, and must notice that there
        # is another one.
        self._dispatcher = (dispatcher,)

    def plan(self, routing: Routing) -> Any:
        """The dispatcher's plan. Where rows are lacking, what would have sufficed stays in
        `demand`, or `evaluation_demand`."""
        plan = self.dispatcher.preprocess(routing)
        if (demand := self.dispatcher.demand(plan)) is not None:
            largest = self.demand if self.learns() else self.evaluation_demand
            with torch.no_grad():
                largest.copy_(torch.maximum(largest, demand))
        return plan

    def learns(self) -> bool:
        """Returns whether this call is one of training, whose backward follows."""
        return self.training and torch.is_grad_enabled()

    def forget_demand(self) -> None:
        """Forgets that rows were lacking."""
        self.demand.zero_()
        self.evaluation_demand.zero_()
