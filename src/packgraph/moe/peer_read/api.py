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
everything, which needs no common memory. The naive twin is in moe/peer_read/naive.py.
"""  # noqa: E501

from typing import Any

import torch
from torch import Tensor

from packgraph.moe.peer_read.buffers import Buffers, meet
from packgraph.moe.peer_read.plan import PeerReadPlan, of_all
from packgraph.moe.permute.api import RowPlan, combine_rows


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
