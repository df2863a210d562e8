"""Attention of a row that is cut in zigzag: queries stay, keys and values of all ranks come.

    k, v of own rows --all-gather--> of all rows --reorder--> prefixes --+ q of own rows
    -------------------------------------------------------+-- attention by any backend --> own rows

The backward goes the same way back: gradients of prefixes are added up for each row (two addends at
most), sent to the ranks whose rows they are, and added up there in the order of ranks. All are
gathers and sums in a fixed order, no atomics: same bits in every run, whatever the documents are.

A rank keeps the prefixes for the backward: T + T / 2c rows of keys and values where ulysses keeps T
rows of 1 / c of the heads. Padding inside documents is attended to by padding alone, is zero in the
output, and its gradients are zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.attention.context import ContextGroup, group_of, swap_parts
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.ops.attention.options import PLAIN, ScoreOptions
from packgraph.ops.attention.zigzag import PrefixRows
from packgraph.ops.collectives import all_gather_flat

Backend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float | None, ScoreOptions], Tensor]


def zigzag_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, scale: float | None, backend: Backend
) -> Tensor:
    """Attention of own rows over the whole row: q [R, Hq, D], k [R, Hkv, D], v [R, Hkv, Dv] -> [R,
    Hq, Dv], zero in padding. meta: with `keys`. Collective. Raises ValueError where k and v are of
    two dtypes."""
    assert meta.context is not None and meta.keys is not None
    padding = meta.padding_mask[:, None, None]
    if (
        not meta.finite_padding
    ):  # padding inside documents lies among their rows, where a kernel reads it
        q, k, v = (x.masked_fill(padding, 0.0) for x in (q, k, v))
    out = backend(q, *prefixes(k, v, meta.keys, meta.context), meta, scale, PLAIN)
    return out.masked_fill(padding, 0.0)


def prefixes(
    k: Tensor, v: Tensor, keys: PrefixRows, context: ContextGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values of own rows [R, H, D] and [R, H, Dv] -> of the prefixes [Kx, H, D] and [Kx,
    H, Dv]; in the tail stand those of some row. Collective. Raises ValueError where they are of two
    dtypes."""
    if k.dtype != v.dtype:
        raise ValueError(
            f"keys and values travel together, so they must be of one dtype, not {k.dtype} and "
            f"{v.dtype}; "
            "cast them before attention"
        )
    own = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    every = gather_parts(own, context).flatten(0, 1)
    found = _Reorder.apply(every, keys.take, keys.places, k.shape[1] * k.shape[2])
    return found[0].unflatten(1, k.shape[1:]), found[1].unflatten(1, v.shape[1:])


def gather_parts(x: Tensor, context: ContextGroup) -> Tensor:
    """Gathers the parts of all ranks: x [...] -> [size, ...], rank r's at [r]. Collective.
    Differentiable: every rank gets the sum of what the ranks say of its part, added up in their
    order (in float32 where x is narrower)."""
    made: Tensor = _gather(x, context.name, context.size)
    return made


class _Reorder(torch.autograd.Function):
    """every [M, C] -> rows `take` of its first `columns` columns [Kx, columns] and of the others
    [Kx, C - columns].

    places: int64 [M, 2], where each row went, -1 = nowhere. Reads no gradient that lies at no
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, every: Tensor, take: Tensor, places: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        return every[:, :columns].index_select(0, take), every[:, columns:].index_select(0, take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        nowhere, safe = (places < 0).unbind(1), places.clamp(min=0).unbind(1)
        sums = []
        for grad in grads:
            first, second = (
                grad.index_select(0, at).masked_fill(none[:, None], 0.0)
                for at, none in zip(safe, nowhere, strict=True)
            )
            sums.append(first + second)
        return torch.cat(sums, dim=1), None, None, None


@torch.library.custom_op("packgraph::gather_parts", mutates_args=())
def _gather(x: Tensor, group: str, size: int) -> Tensor:
    out = x.new_empty(size, *x.shape)
    all_gather_flat(out.flatten(0, 1), x.contiguous(), group=group_of(group))
    return out


@_gather.register_fake
def _gathered_shape(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty(size, *x.shape)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _sum_parts(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return swap_parts(grad, ctx.group).sum(0), None, None


_gather.register_autograd(_sum_parts, setup_context=_save_group)
