"""Dispatchers over ranks: by all-to-alls of exactly the rows that are routed, for which the host
must wait; by all-to-alls of a fixed number of rows per pair of ranks; and over memory that ranks
read from each other.

    make_dispatcher("padded", num_experts, group, factor=1.25)
"""

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.graphs import fallback
from packgraph.moe.dispatch.dispatcher import (
    Dispatcher,
    ExpertRows,
    LocalDispatcher,
    Routing,
)
from packgraph.moe.peer_read import (
    PeerReadPlan,
    SymmetricBuffers,
    from_experts,
    plan_peer_read,
    rounded,
    rows_for,
    to_experts,
)
from packgraph.moe.permute import (
    RowPlan,
    before,
    combine_rows,
    count_rows,
    gather_pairs,
    gather_rows,
    place_segments,
    plan_rows,
)

DispatcherName = Literal["local", "host_splits", "padded", "symmetric"]
Splits = Sequence[int] | None
SYNCS = (
    "the host reads how many rows each rank sends and receives, and waits for the device; "
    "use the padded or the symmetric dispatcher"
)
SHAPES = (
    "its shapes are the numbers of rows that were routed, which the host has read in "
    "moe_preprocess; "
    "use the padded or the symmetric dispatcher"
)


def exchange(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    send: Splits = None,
    receive: Splits = None,
) -> tuple[Tensor, ...]:
    """Rows of each tensor [rows, ...] to the ranks of `group`, in rank order; what they sent, in
    rank order.

    send, receive: rows per rank, None = equal parts (static). Collective over `group`; None = this
    process alone, which keeps its rows. Differentiable: the backward is the exchange in the other
    direction.

    What goes to a rank on the way there comes back from it on the way back:

        rank 0   [to 0 | to 1]  ->  [from 0 | from 1]    forward of dispatch, backward of combine
        rank 1   [to 0 | to 1]  ->  [from 0 | from 1]    forward of combine, backward of dispatch

    All tensors of an exchange go in one autograd node and in the order in which they are given, so
    that ranks cannot disagree about the order of their collectives in the backward. Only data
    moves; nothing is added up.
    """
    return tuple(tensors) if group is None else _Exchange.apply(group, send, receive, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, send: Splits, receive: Splits, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return tuple(_all_to_all(tensor, group, send, receive) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = (_all_to_all(grad, ctx.group, ctx.receive, ctx.send) for grad in grads)
        return None, None, None, *back


def _all_to_all(tensor: Tensor, group: dist.ProcessGroup, send: Splits, receive: Splits) -> Tensor:
    rows = tensor.shape[0] if receive is None else sum(receive)
    out = tensor.new_empty((rows, *tensor.shape[1:]))
    if torch.compiler.is_compiling() and fallback.READING:  # Dynamo cannot call it
        return out
    dist.all_to_all_single(out, tensor.contiguous(), _listed(receive), _listed(send), group=group)
    return out


def _listed(splits: Splits) -> list[int] | None:
    return None if splits is None else list(splits)


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


class HostSplitsDispatcher(Dispatcher):
    """An all-to-all of what is routed.

        preprocess   counts [ranks, experts] --all-to-all--> counts of the others --host--> sizes of
                     everything after
        dispatch     rows by expert --all-to-all, those sizes--> rows from all ranks --> by expert
        combine      the same in the other direction, then the sum of each token's rows

    Nothing can overflow, no row is padding: this is what the static dispatchers are measured
    against and tested with. The shapes of dispatch, experts and combine follow from the data, so
    none of them can be captured.
    """

    why_not = MappingProxyType(
        {"moe_preprocess": SYNCS}
        | dict.fromkeys(("moe_dispatch", "moe_experts", "moe_combine"), SHAPES)
    )

    def preprocess(self, routing: Routing) -> HostSplitsPlan:
        """Exchange and read the counts. The host waits for the device."""
        departures = plan_rows(routing.experts, self.num_experts, routing.experts.numel())
        counts = count_rows(departures.offsets).view(self.ranks, self.count)
        (arriving,) = exchange((counts,), self.group)
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
        return torch.zeros_like(plan.departures.needed)

    def _exchange(
        self, tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]
    ) -> list[Tensor]:
        """Exchange tensors [rows, width]. Where there is no row, one of zeros stands for none:
        kernels need one."""
        given = [tensor if sum(send) else tensor[:0] for tensor in tensors]
        taken = exchange(given, self.group, send, receive)
        return [tensor if sum(receive) else F.pad(tensor, (0, 0, 0, 1)) for tensor in taken]


class _Budgeted(Dispatcher):
    """A dispatcher whose room is `factor` times what a balanced load needs.

    For more room put another dispatcher in its place (`with_factor`): graphs notice that, and are
    captured anew with the new shapes.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup | None, factor: float) -> None:
        """Raises ValueError when the ranks cannot share the experts equally, or for a factor below
        1."""
        if not (math.isfinite(factor) and factor >= 1):
            raise ValueError(
                f"a factor of {factor} leaves less room than a balanced load needs: give 1 or more"
            )
        super().__init__(num_experts, group)
        self.factor = factor

    @property
    def most_factor(self) -> float:
        """The factor that always suffices: one rank gets everything."""
        return float(self.ranks)


class PaddedPlan(NamedTuple):
    """departures: pairs and places of the send buffer. arrivals: places of the receive buffer and
    rows by expert.

    Both buffers have ranks * C places. needed: int64 [], the most rows that this rank has for one
    rank.
    """

    departures: RowPlan
    arrivals: RowPlan
    needed: Tensor


class PaddedDispatcher(_Budgeted):
    """An all-to-all of C places per pair of ranks. factor: C over the balanced load T * k /
    ranks.

        send buffer of a rank     |e0 e0 e1 .|e2 e3 e3 e3|    C = 4 places for each of 2 ranks, by
                                                              expert, then empty
        received by rank 1        |e2 e3 e3 e3|e2 e2 . .|     C places from each rank, with the ends
                                                              of its experts
        rows by expert            |e2 e2 e2|e3 e3 e3| . .|    R = ranks * C rows

    C follows from the number of tokens alone. Pairs beyond it are an overflow: they have no place,
    send nothing, get nothing back, and the plan counts what was needed. All shapes are static and
    nothing waits for the host, so every stage can be captured. All ranks of the group must work on
    the same number of tokens (one bucket) at a time, since C follows from it.
    """

    def room(self, pairs: int) -> int:
        """C, the places for rows from one rank to another, for T * k = `pairs` routed pairs."""
        return rounded(min(math.ceil(pairs * self.factor / self.ranks), pairs))

    def preprocess(self, routing: Routing) -> PaddedPlan:
        """The plan of both buffers; exchanges the ends of experts. No host sync."""
        ranks, room = self.ranks, self.room(routing.experts.numel())
        ordered = plan_rows(routing.experts, self.num_experts, routing.experts.numel())
        departures, ends, needed = _depart(routing.experts, ordered, ranks, room)
        (arriving,) = exchange((ends,), self.group)
        counts = torch.diff(arriving, dim=1, prepend=arriving.new_zeros(ranks, 1))
        starts = before(counts) + torch.arange(0, ranks * room, room, device=ends.device)[:, None]
        return PaddedPlan(
            departures, place_segments(counts, starts, ranks * room, ranks * room), needed
        )

    def dispatch(self, x: Tensor, routing: Routing, plan: PaddedPlan) -> ExpertRows:
        """x: [T, H]. Returns ranks * C rows."""
        leaving = gather_rows(x, plan.departures), gather_pairs(routing.weights, plan.departures)
        values, weights = exchange(leaving, self.group)
        return ExpertRows(
            gather_rows(values, plan.arrivals),
            gather_pairs(weights[:, None], plan.arrivals),
            plan.arrivals.offsets,
        )

    def combine(self, rows: Tensor, plan: PaddedPlan) -> Tensor:
        """rows: [ranks * C, H] of the experts, weights applied. Returns [T, H]."""
        (back,) = exchange((combine_rows(rows, plan.arrivals),), self.group)
        return combine_rows(back, plan.departures)

    def overflow(self, plan: PaddedPlan) -> Tensor:
        """Number of rows beyond C that this rank has for some rank: int64 []."""
        return (plan.needed - plan.departures.pair_of_row.numel() // self.ranks).clamp(min=0)

    def demand(self, plan: PaddedPlan) -> Tensor:
        pairs = plan.departures.row_of_pair.numel()
        wanted = (plan.needed * (1000 * self.ranks) + pairs - 1) // pairs
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


class SymmetricDispatcher(_Budgeted):
    """An exchange whose sizes stay on the device.

    factor: R over the balanced load T * k. buffers: shared by the layers, with room for it. All
    ranks must work on the same number of tokens (one bucket) at a time.

        preprocess   all-gather of the chosen experts --> every rank knows the row of every pair
        dispatch     publish tokens and weights, pull each token that has rows here into all of them
        combine      publish rows, pull each token's k rows and sum them

    A rank has room for R rows, however they are spread over the senders. Where more are routed to a
    rank, the last of them by expert have no row: every rank knows all pairs, so all of a group
    leave out the same ones and see the same overflow. All shapes are static and nothing waits for
    the host. What is kept for the backward is the plan, never the common memory, which the next
    exchange overwrites (`moe/peer_read.py`).
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup | None,
        factor: float,
        buffers: SymmetricBuffers,
    ) -> None:
        super().__init__(num_experts, group, factor)
        self.buffers = buffers

    def room(self, pairs: int) -> int:
        """R, the rows of this rank's experts, for T * k = `pairs` routed pairs on every rank."""
        return rows_for(pairs, self.factor, self.ranks)

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
            self.ranks,
            self.first // self.count,
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
        pairs = plan.place_of_pair.numel()
        return torch.where(self.overflow(plan) > 0, (plan.needed * 1000 + pairs - 1) // pairs, 0)


Budgeted = PaddedDispatcher | SymmetricDispatcher


def make_dispatcher(
    name: str,
    num_experts: int,
    group: dist.ProcessGroup | None,
    factor: float,
    buffers: SymmetricBuffers | None = None,
) -> Dispatcher:
    """A dispatcher for one layer. group: the ranks that share its experts, None = this process has
    all.

    factor: room for rows over the balanced load, where a dispatcher has a budget. buffers: for
    `symmetric`, shared by all layers. Raises ValueError for an unknown name, for experts that the
    ranks cannot share equally, for a factor below 1, for `local` with several ranks, and for
    `symmetric` without buffers.
    """
    if name == "local":
        if group is not None:
            raise ValueError(
                f"the local dispatcher sends nothing, but {dist.get_world_size(group)} ranks share "
                "the "
                "experts: choose another"
            )
        return LocalDispatcher(num_experts)
    if name == "host_splits":
        return HostSplitsDispatcher(num_experts, group)
    if name == "padded":
        return PaddedDispatcher(num_experts, group, factor)
    if name == "symmetric":
        if buffers is None:
            raise ValueError(
                "the symmetric dispatcher needs the buffers that its layers share: make "
                "SymmetricBuffers before the layers"
            )
        return SymmetricDispatcher(num_experts, group, factor, buffers)
    raise ValueError(
        f"there is no dispatcher {name!r}; there are {', '.join(get_args(DispatcherName))}"
    )


def with_factor(dispatchers: Sequence[Budgeted], factor: float) -> list[Budgeted]:
    """The same dispatchers with room for `factor` times a balanced load, inf = for whatever comes,
    and none with less than it has. Collective: all ranks must take the same. What shares buffers
    goes on to share larger ones, made once.
    """
    made: list[Budgeted] = []
    larger: dict[tuple[SymmetricBuffers, float], SymmetricBuffers] = {}
    for dispatcher in dispatchers:
        wanted = max(dispatcher.most_factor if math.isinf(factor) else factor, dispatcher.factor)
        if isinstance(dispatcher, PaddedDispatcher):
            made.append(PaddedDispatcher(dispatcher.num_experts, dispatcher.group, wanted))
            continue
        key = dispatcher.buffers, wanted
        if key not in larger:
            larger[key] = dispatcher.buffers.grown(wanted)
        made.append(
            SymmetricDispatcher(dispatcher.num_experts, dispatcher.group, wanted, larger[key])
        )
    return made
