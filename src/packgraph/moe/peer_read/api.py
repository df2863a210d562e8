"""Rows that ranks read from each other's memory: tokens to the rows of experts, and each token's
rows back as a sum.

    barrier | publish: own rows --> own memory | barrier | pull: rows of all ranks' memory --> result
    nobody reads it any more                     everyone has published

    to_experts     x [T, H], weights [T, k]   -->  values [R, H], weights [R]     each token is read once per rank
    from_experts   rows [R, H]                -->  [T, H]                         k rows per token, summed in order

The backward of one is the other one. Results are read or written in a fixed order, never added to:
nothing is atomic, and the same bits come out in every run. Each is one operation for torch.compile
and for whoever watches operations. It knows the group by its name, and the memory is its own, as a
communicator's is: what is there between two calls means nothing, so an operation is a function of
its other arguments. On CUDA it is kernels (moe/peer_read/kernel.py); elsewhere an all-gather of
everything, which needs no common memory.

`plan_peer_read` finds where every routed pair of the group lies in the rows of experts; each rank
does so by itself:

    experts of all ranks [ranks * T, k]   --plan_rows-->   rows of all experts, one after the other
    e0 e1 | e2 e3                         cut by ranks     rows of rank 0 | rows of rank 1

One all-gather of the chosen experts is all that ranks tell each other. Within an expert rows lie in
the order of ranks, within a rank in the order of tokens: as one process would lay the tokens of all
ranks. A rank has room for R rows; pairs beyond have none, and every rank knows which. No host sync.

The naive twins are loops that read the host, for all ranks of a group in one process: lists have an
entry for every rank. The tensors may require gradients: autograd of these loops is what the
backwards of the operations mean.
"""  # noqa: E501

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.peer_read.buffers import Buffers, meet
from packgraph.moe.permute import RowPlan, combine_rows, plan_rows
from packgraph.ops.attention.context import group_of
from packgraph.ops.collectives import all_gather_flat
from packgraph.ops.triton_found import HAS_TRITON


class PeerReadPlan(NamedTuple):
    """Plan of a rank's reads from the others. Pairs (token t, place j) of rank q are numbered (q *
    T + t) * k + j.

    row_of_pair: int32 [ranks * T, k], this rank's row of every rank's pairs, -1 where another
    rank's expert is chosen, in padding and beyond R. place_of_pair: int32 [T, k], rank * R + row of
    each own pair, -1 where it has none. offsets: int32 [experts of this rank], one past the last
    row of each. needed: int64 [], the most rows that any rank of the group needs.
    """

    row_of_pair: Tensor
    place_of_pair: Tensor
    offsets: Tensor
    needed: Tensor


def plan_peer_read(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> PeerReadPlan:
    """The plan of `rank`, one of `ranks` that share `num_experts` experts in equal parts, in order.
    Collective.

    experts: int32 [T, k], -1 = routed nowhere; T is the same on all ranks. rows: R. group: name of
    the process group, "" = this process alone. Raises ValueError where places do not fit into 32
    bits.
    """
    if max(ranks * rows, ranks * experts.numel()) >= 2**31:
        raise ValueError(
            f"{ranks} ranks with {rows} rows for {experts.numel()} routed pairs each cannot be "
            "numbered "
            "in 32 bits: use fewer tokens per microbatch"
        )
    return PeerReadPlan(*_plan(experts, num_experts, ranks, rank, rows, group))


def of_all(x: Tensor, group: str) -> Tensor:
    """[ranks * N, ...]: x [N, ...] of all ranks of the group of that name, bit by bit; "" = x
    itself. Collective."""
    if not group:
        return x
    members, mine = group_of(group), x.contiguous().view(-1).view(torch.uint8)
    out = mine.new_empty(dist.get_world_size(members) * mine.numel())
    all_gather_flat(out, mine, group=members)
    return out.view(x.dtype).view(-1, *x.shape[1:])


def locate(
    everyone: Tensor, ordered: RowPlan, ranks: int, rank: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a PullPlan. everyone: int32 [ranks * T, k]; ordered: their plan, with a row for
    every pair."""
    if HAS_TRITON and everyone.is_cuda:
        from packgraph.moe.peer_read.kernel import locate as by_kernel

        return by_kernel(everyone, ordered.row_of_pair, ordered.offsets, ranks, rank, rows)
    ends = ordered.offsets.view(ranks, -1)
    last = ends[:, -1]
    first = torch.cat((last.new_zeros(1), last[:-1]))
    owner = (everyone // ends.shape[1]).clamp(0, ranks - 1)
    row = ordered.row_of_pair - first[owner]
    fits = (ordered.row_of_pair >= 0) & (row < rows)
    place = torch.where(fits, owner * rows + row, -1).view(ranks, -1, everyone.shape[1])[rank]
    here = torch.where(fits & (owner == rank), row, -1)
    return (
        here,
        place.clone(),
        (ends[rank] - first[rank]).clamp(max=rows),
        (last - first).amax().long(),
    )


@torch.library.custom_op("packgraph::plan_pull", mutates_args=())
def _plan(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    everyone = of_all(experts.int(), group)
    return locate(everyone, plan_rows(everyone, num_experts, everyone.numel()), ranks, rank, rows)


@_plan.register_fake
def _plan_shapes(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, places = experts.shape

    def empty(*shape: int) -> Tensor:
        return experts.new_empty(shape, dtype=torch.int32)

    return (
        empty(ranks * tokens, places),
        empty(tokens, places),
        empty(num_experts // ranks),
        experts.new_empty((), dtype=torch.int64),
    )


def to_experts(
    x: Tensor, weights: Tensor, plan: PeerReadPlan, rows: int, buffers: Buffers
) -> tuple[Tensor, Tensor]:
    """Rows of this rank's experts: [R, H] and float32 [R], both zero from offsets[-1] on.
    Differentiable. Collective.

    x: [T, H]. weights: float32 [T, k]. rows: R, the same on all ranks.
    """
    _check(x, max(x.shape[0], rows), buffers)
    values, of_rows = _to_experts(
        x,
        weights,
        *plan[:3],
        buffers.memory,
        buffers.peers,
        rows,
        buffers.rows,
        buffers.rank,
        buffers.group,
    )
    return values, of_rows


def from_experts(y: Tensor, plan: PeerReadPlan, buffers: Buffers) -> Tensor:
    """The sum of each token's rows, in the order of its places, in float32: [T, H]. Differentiable.
    Collective.

    y: [R, H]; from offsets[-1] on it is not read.
    """
    _check(y, y.shape[0], buffers)
    sums, _ = _from_experts(
        y,
        _none(y),
        *plan[:3],
        buffers.memory,
        buffers.peers,
        y.shape[0],
        buffers.rows,
        buffers.rank,
        buffers.group,
    )
    return sums


def _check(x: Tensor, rows: int, buffers: Buffers) -> None:
    if x.dtype != buffers.dtype or x.shape[1] != buffers.width:
        raise ValueError(
            f"rows {x.dtype} of width {x.shape[1]} do not go through symmetric buffers for "
            f"{buffers.dtype} of width {buffers.width}; make the buffers for the model's hidden "
            "size and "
            "the dtype of its activations"
        )
    if rows > buffers.rows:
        raise ValueError(
            f"{rows} rows do not go through symmetric buffers of {buffers.rows} rows: make them "
            "for the "
            "largest bucket and factor"
        )


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("packgraph::pull_to_experts", mutates_args=())
def _to_experts(
    x: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """weights: [T, k], or [0] where there are none. room: rows that the memory has."""
    if x.is_cuda:
        from packgraph.moe.peer_read.kernel import publish, spread

        meet(memory, group)
        publish(x, weights, memory, room)
        meet(memory, group)
        return spread(peers, row_of_pair, offsets, x, weights.numel() > 0, rows, room, rank)
    numbers = torch.arange(row_of_pair.numel(), dtype=torch.int32)
    # One row more, for pairs that have none here.
    row = torch.where(row_of_pair >= 0, row_of_pair, rows).flatten().long()
    pair_of_row = torch.full((rows + 1,), -1, dtype=torch.int32).scatter(0, row, numbers)[:rows]
    live, pair = pair_of_row >= 0, pair_of_row.clamp(min=0).long()
    values = torch.where(live[:, None], of_all(x, group)[pair // row_of_pair.shape[1]], 0)
    if not weights.numel():
        return values, _none(x)
    return values, torch.where(live, of_all(weights.flatten(), group)[pair], 0)


@torch.library.custom_op("packgraph::pull_from_experts", mutates_args=())
def _from_experts(
    y: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """weights: [R], or [0] where there are none. Sums [T, H], and [T, k] of weights, 0 where a pair
    has no row."""
    if y.is_cuda:
        from packgraph.moe.peer_read.kernel import collect, publish

        meet(memory, group)
        publish(y, weights, memory, room, offsets)
        meet(memory, group)
        return collect(peers, place_of_pair, y, weights.numel() > 0, rows, room)
    sums = combine_rows(of_all(y, group), RowPlan(place_of_pair, place_of_pair, offsets, offsets))
    if not weights.numel():
        return sums, _none(y)
    return sums, torch.where(
        place_of_pair >= 0, of_all(weights, group)[place_of_pair.clamp(min=0).long()], 0
    )


@_to_experts.register_fake
def _to_shapes(
    x: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows, x.shape[1]), weights.new_empty(rows if weights.numel() else 0)


@_from_experts.register_fake
def _from_shapes(
    y: Tensor,
    weights: Tensor,
    row_of_pair: Tensor,
    place_of_pair: Tensor,
    offsets: Tensor,
    memory: Tensor,
    peers: Tensor,
    rows: int,
    room: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return (
        y.new_empty(place_of_pair.shape[0], y.shape[1]),
        weights.new_empty(place_of_pair.shape if weights.numel() else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:7])
    ctx.constants = inputs[7:]


def _differentiate_to(ctx: Any, grad: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
    return *_from_experts(grad, of_weights, *ctx.saved_tensors, *ctx.constants), *[None] * 9


def _differentiate_from(ctx: Any, grad: Tensor, of_weights: Tensor) -> tuple[Tensor | None, ...]:
    return *_to_experts(grad, of_weights, *ctx.saved_tensors, *ctx.constants), *[None] * 9


_to_experts.register_autograd(_differentiate_to, setup_context=_save)
_from_experts.register_autograd(_differentiate_from, setup_context=_save)


def naive_plans(experts: Sequence[Tensor], num_experts: int, rows: int) -> list[PeerReadPlan]:
    """The specification of `plan_peer_read`. experts: int [T, k] of every rank."""
    ranks, (tokens, places) = len(experts), experts[0].shape
    here = torch.full((ranks, ranks, tokens, places), -1, dtype=torch.int32)  # by owner and sender
    place_of_pair = torch.full((ranks, tokens, places), -1, dtype=torch.int32)
    offsets, needed = torch.zeros(ranks, num_experts // ranks, dtype=torch.int32), [0] * ranks
    chosen = [rank.tolist() for rank in experts]
    for expert in range(num_experts):
        owner, own = divmod(expert, num_experts // ranks)
        for sender in range(ranks):
            for token in range(tokens):
                for place in range(places):
                    if chosen[sender][token][place] != expert:
                        continue
                    row = needed[owner]
                    needed[owner] += 1
                    if row < rows:
                        here[owner, sender, token, place] = row
                        place_of_pair[sender, token, place] = owner * rows + row
        offsets[owner, own] = min(needed[owner], rows)
    return [
        PeerReadPlan(
            here[rank].view(-1, places),
            place_of_pair[rank],
            offsets[rank],
            torch.tensor(max(needed)),
        )
        for rank in range(ranks)
    ]


def naive_to_experts(
    x: Sequence[Tensor], weights: Sequence[Tensor], plan: PeerReadPlan, rows: int
) -> tuple[Tensor, Tensor]:
    """The specification of `to_experts` on one rank. x: [T, H] and weights: [T, k] of every
    rank."""
    values: list[Tensor] = [x[0].new_zeros(x[0].shape[1])] * rows
    of_rows: list[Tensor] = [weights[0].new_zeros(())] * rows
    tokens = x[0].shape[0]
    for number, row_of_place in enumerate(plan.row_of_pair.tolist()):
        for place, row in enumerate(row_of_place):
            if row >= 0:
                values[row] = x[number // tokens][number % tokens]
                of_rows[row] = weights[number // tokens][number % tokens, place]
    return torch.stack(values), torch.stack(of_rows)


def naive_from_experts(y: Sequence[Tensor], plan: PeerReadPlan) -> Tensor:
    """The specification of `from_experts` on one rank. y: [R, H] of every rank."""
    wide = torch.promote_types(y[0].dtype, torch.float32)
    sums = []
    for places in plan.place_of_pair.tolist():
        total = torch.zeros(y[0].shape[1], dtype=wide, device=y[0].device)
        for place in places:
            if place >= 0:
                total = total + y[place // y[0].shape[0]][place % y[0].shape[0]].to(wide)
        sums.append(total.to(y[0].dtype))
    return torch.stack(sums)
