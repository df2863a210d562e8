"""Tokens to experts over memory that ranks read from each other: exactly the rows that are routed, and no host.

    preprocess   all-gather of every rank's counts and order of pairs --> all sizes and places, the same on all ranks
    dispatch     rows by rank into `send` -- exchange --> `receive` --gather--> rows by expert; weights by all-gather
    combine      rows into `send` in the order in which they came -- exchange --> sum of each token's rows

A rank has room for R rows, `factor` times the balanced load, however they are spread over the senders. Where more are
routed to a rank, the last of them have no row: every rank knows all counts, so all of a group leave out the same pairs
and see the same overflow. All shapes are static and nothing waits for the host. What is kept for the backward is rows
by expert and the plan, never the buffers, which the next exchange overwrites.
"""
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.moe.dispatch import Routing, Rows
from packgraph.moe.exchange import gather_all
from packgraph.moe.rows import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows
from packgraph.moe.segments import before, count_rows, place_segments
from packgraph.moe.sharing import Sharing
from packgraph.moe.symmetric_buffers import Buffers, chunked

MULTIPLE = 8


class SymmetricPlan(NamedTuple):
    """departures: pairs and places of `send`. arrivals: places of `receive` and rows by expert.

    there, back: how the two exchanges are cut. weights: all ranks' pairs and this rank's rows. needed: int64 [], the
    most rows that any rank of the group needs.
    """

    departures: RowPlan
    arrivals: RowPlan
    there: Tensor
    back: Tensor
    weights: RowPlan
    needed: Tensor


class SymmetricDispatcher:
    """An exchange whose sizes stay on the device. group: the ranks that share the experts, in order.

    factor: R over the balanced load T * k; `ranks` always suffices. For more room put another dispatcher in its place
    (`with_factor`). buffers: shared by the layers. All ranks must work on the same number of tokens (one bucket) at a
    time.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None, factor: float, buffers: Buffers) -> None:
        """Raises ValueError when the ranks cannot share the experts equally, or for a factor below 1."""
        if not (math.isfinite(factor) and factor >= 1):
            raise ValueError(f"a factor of {factor} leaves less room than a balanced load needs: give 1 or more")
        self._sharing, self._group, self.factor = Sharing.over(num_experts, group), group, factor
        self.num_experts, self.first, self.count = num_experts, self._sharing.first, self._sharing.count
        self._buffers = buffers

    @property
    def why_not(self) -> dict[str, str]:
        """Nothing stands against capturing any stage."""
        return {}

    def room(self, pairs: int) -> int:
        """R, the rows of this rank's experts, for T * k = `pairs` routed pairs on every rank."""
        return _rounded(min(math.ceil(pairs * self.factor), pairs * self._sharing.ranks))

    def with_factor(self, factor: float) -> "SymmetricDispatcher":
        """The same with another factor, as far as the buffers have room. All ranks of the group must take the same."""
        return SymmetricDispatcher(self.num_experts, self._group, factor, self._buffers)

    def preprocess(self, routing: Routing) -> SymmetricPlan:
        """All sizes and places. No host sync. Raises ValueError when the buffers are too small for so many tokens."""
        pairs, places = routing.experts.numel(), routing.experts.shape[1]
        room, guard = self.room(pairs), self._buffers.guard
        if max(pairs, room) + guard > self._buffers.send.shape[0]:
            raise ValueError(f"{pairs} routed pairs need symmetric buffers of {max(pairs, room)} rows, but these have "
                             f"{self._buffers.send.shape[0] - guard}: make them for the largest bucket and factor")
        ordered = plan_rows(routing.experts, self.num_experts, pairs)
        told = torch.cat((count_rows(ordered.offsets).int(), ordered.pair_of_row))
        ranks, me = self._sharing.ranks, self._sharing.rank
        known = gather_all(told, self._group)
        counts = known[:, : self.num_experts].long().view(ranks, ranks, self.count)  # by sender, receiver, expert
        totals = counts.sum(-1)
        kept = (room - before(totals.t()).t()).clamp(min=0).minimum(totals)
        ends = counts.cumsum(-1).minimum(kept[..., None])
        arriving = torch.diff(ends[:, me], dim=1, prepend=ends.new_zeros(ranks, 1))
        came_to = guard + before(kept[:, me])
        arrivals = place_segments(arriving, came_to[:, None] + before(arriving), guard + room, room)
        first = before(totals)  # by sender and receiver: where a sender's pairs for a receiver begin in its order
        index = _pairs_of_rows(arrivals, known[:, self.num_experts :], came_to, first[:, me])
        return SymmetricPlan(
            _depart(routing.experts, ordered, kept[me], first[me], ends[me], guard), arrivals,
            chunked(kept[me], guard + before(kept[me]), self._buffers.chunks, guard if me == 0 else 0),
            chunked(kept[:, me], came_to, self._buffers.chunks, guard if me == 0 else 0),
            RowPlan(index, _inverse(index, ranks * pairs).view(-1, places), arrivals.offsets, arrivals.needed),
            totals.sum(0).amax())

    def dispatch(self, x: Tensor, routing: Routing, plan: SymmetricPlan) -> Rows:
        """x: [T, H]. Returns R rows."""
        values = _There.apply(x, self._buffers, plan.there, plan.back, *plan.departures, *plan.arrivals)
        weights = gather_all(routing.weights.reshape(-1), self._group)
        return Rows(values, gather_pairs(weights.view(-1, routing.weights.shape[1]), plan.weights),
                    plan.arrivals.offsets)

    def combine(self, rows: Tensor, plan: SymmetricPlan) -> Tensor:
        """rows: [R, H] of the experts, weights applied. Returns [T, H]."""
        made: Tensor = _Back.apply(rows, self._buffers, plan.there, plan.back, *plan.departures, *plan.arrivals)
        return made

    def overflow(self, plan: SymmetricPlan) -> Tensor:
        """How many rows more than R some rank of the group needs: int64 [], the same on all of them."""
        return (plan.needed - plan.weights.pair_of_row.shape[0]).clamp(min=0)

    def demand(self, plan: SymmetricPlan) -> Tensor:
        """Where rows were lacking the factor that would have sufficed, in thousandths, rounded up; else 0: int64 []."""
        pairs = plan.departures.row_of_pair.numel()
        return torch.where(self.overflow(plan) > 0, (plan.needed * 1000 + pairs - 1) // pairs, 0)


class _There(torch.autograd.Function):
    """Tokens [T, H] to rows by expert [R, H]; the way back in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffers: Buffers, there: Tensor, back: Tensor, *maps: Tensor) -> Tensor:
        ctx.buffers = buffers
        ctx.save_for_backward(back, *maps)
        return _to_experts(x, buffers, there, RowPlan(*maps[:4]), RowPlan(*maps[4:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back, *maps = ctx.saved_tensors
        found = _from_experts(grad, ctx.buffers, back, RowPlan(*maps[:4]), RowPlan(*maps[4:]))
        return found, *[None] * 11


class _Back(torch.autograd.Function):
    """Rows by expert [R, H] to the sum of each token's rows [T, H]; the way there in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffers: Buffers, there: Tensor, back: Tensor, *maps: Tensor) -> Tensor:
        ctx.buffers = buffers
        ctx.save_for_backward(there, *maps)
        return _from_experts(rows, buffers, back, RowPlan(*maps[:4]), RowPlan(*maps[4:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        there, *maps = ctx.saved_tensors
        found = _to_experts(grad, ctx.buffers, there, RowPlan(*maps[:4]), RowPlan(*maps[4:]))
        return found, *[None] * 11


def _to_experts(x: Tensor, buffers: Buffers, there: Tensor, departures: RowPlan, arrivals: RowPlan) -> Tensor:
    _check(x, buffers)
    buffers.begin()
    # Places without a pair are not sent, so it does not matter which token lies there.
    token = departures.pair_of_row.clamp(min=0) // departures.row_of_pair.shape[1]
    torch.index_select(x, 0, token, out=buffers.send[: token.shape[0]])
    buffers.swap(there)
    return gather_rows(buffers.receive, arrivals)


def _from_experts(rows: Tensor, buffers: Buffers, back: Tensor, departures: RowPlan, arrivals: RowPlan) -> Tensor:
    _check(rows, buffers)
    buffers.begin()
    row = arrivals.row_of_pair[:, 0].clamp(min=0)
    torch.index_select(rows, 0, row, out=buffers.send[: row.shape[0]])
    buffers.swap(back)
    return combine_rows(buffers.receive, departures)


def _check(rows: Tensor, buffers: Buffers) -> None:
    if rows.dtype != buffers.send.dtype or rows.shape[1] != buffers.send.shape[1]:
        raise ValueError(f"rows {rows.dtype} of width {rows.shape[1]} do not go through symmetric buffers for "
                         f"{buffers.send.dtype} of width {buffers.send.shape[1]}; make the buffers for the model's "
                         "hidden size and the dtype of its activations")


def _rounded(rows: int) -> int:
    return -(-rows // MULTIPLE) * MULTIPLE


def _depart(experts: Tensor, ordered: RowPlan, kept: Tensor, first: Tensor, ends: Tensor, guard: int) -> RowPlan:
    """Pairs and places of `send`: after the guard, what is kept for each rank, side by side.

    kept, first: int64 [ranks], how many pairs go to a rank, and where they begin in the order of all. ends: int64
    [ranks, experts], the end of each expert within what goes to its rank.
    """
    pairs, start = ordered.pair_of_row.numel(), before(kept)
    rank = experts.clamp(min=0).long() // ends.shape[1]
    within = ordered.row_of_pair - first[rank]
    place_of_pair = torch.where((ordered.row_of_pair >= 0) & (within < kept[rank]), guard + start[rank] + within, -1)
    place = torch.arange(pairs, device=experts.device)
    to = torch.searchsorted(kept.cumsum(0), place, right=True).clamp(max=kept.numel() - 1)
    pair = ordered.pair_of_row[(first[to] + place - start[to]).clamp(max=pairs - 1)]
    pair_of_place = torch.where(place < kept.sum(), pair, -1)
    return RowPlan(torch.cat((pair.new_full((guard,), -1), pair_of_place)), place_of_pair.int(),
                   (guard + start[:, None] + ends).flatten().int(), ordered.needed)


def _pairs_of_rows(arrivals: RowPlan, orders: Tensor, starts: Tensor, first: Tensor) -> Tensor:
    """Which pair of which rank each row is: int32 [R], rank * T * k + pair, -1 for empty rows.

    orders: int32 [ranks, T * k], every rank's pairs by expert. starts: int64 [ranks], the place of the first row from
    each; first: int64 [ranks], its number in that rank's order.
    """
    place = arrivals.pair_of_row.long()
    rank = (torch.searchsorted(starts, place, right=True) - 1).clamp(min=0)
    number = (first[rank] + place - starts[rank]).clamp(0, orders.shape[1] - 1)
    pair = orders.flatten()[rank * orders.shape[1] + number]
    return torch.where(place >= 0, rank * orders.shape[1] + pair, -1).int()


def _inverse(index: Tensor, size: int) -> Tensor:
    """Where each of `size` numbers stands in `index` (each at most once, -1 not at all): int32 [size], -1 = nowhere."""
    at = torch.arange(index.numel(), dtype=torch.int32, device=index.device)
    found = torch.full((size + 1,), -1, dtype=torch.int32, device=index.device)
    return found.scatter(0, torch.where(index >= 0, index, size).long(), torch.where(index >= 0, at, -1))[:size]
