"""A row of tokens spread over ranks: which rows a rank works on, and attention over all of them.

    rank 0   tokens 0 1 of heads a b c d   --parts to all ranks-->   tokens 0 1 2 3 of heads a b
    rank 1   tokens 2 3 of heads a b c d   <--and back----------     tokens 0 1 2 3 of heads c d

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): everything but attention works on T / c
consecutive rows of the row as it is packed, whatever documents they belong to; attention works on
whole documents, of some heads. So no document is padded, every rank has the same attention work,
and any backend serves. The invariant: what attention of a head sees is what it sees in one process;
only the order in which gradients of shared key heads and of weights are summed differs.

Ranks exchange through custom operations: capture, torch.compile and the recorder see one operation
each. They know the group by its name, a constant, which is part of what a graph bakes.
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from packgraph.ops.attention.kind import ContextKind
from packgraph.ops.kernels import save_constants


class ContextGroup(NamedTuple):
    """The ranks that a row is spread over. size: their number; place: this rank's; name: of their
    process group.

    kind: how they share attention (ops/attention/kind.py); with `zigzag` rows are cut as in
    ops/attention/zigzag.py. All constants: a captured graph bakes them, so size must be part of its
    key, and the rest follow from size.
    """

    size: int
    place: int
    name: str
    kind: ContextKind = "ulysses"


def own_rows(x: Tensor, context: ContextGroup | None) -> Tensor:
    """This rank's rows [T / size, ...] of x [T, ...], a view; all of them without a context. T: a
    multiple of size.

    As ulysses cuts them; rows that zigzag cuts are those of `RankRows.pick`.
    """
    if context is None:
        return x
    rows = x.shape[0] // context.size
    return x.narrow(0, context.place * rows, rows)


def whole_rows(
    q: Tensor, k: Tensor, v: Tensor, context: ContextGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All rows of this rank's heads of all heads of this rank's rows, in one exchange.

    q: [T / size, Hq, D]; k: [T / size, Hkv, D]; v: [T / size, Hkv, Dv], of one dtype. Returns [T,
    Hq / size, D] and keys and values of K / size heads, K being Hkv or, if size does not divide
    that, the least common multiple of both: key heads that several ranks need are sent to each of
    them, and their gradients come back and are summed in the order of ranks. Raises ValueError
    where size does not divide Hq, and for unequal dtypes.
    """
    size, heads, key_heads = context.size, q.shape[1], k.shape[1]
    if heads % size:
        raise ValueError(
            f"{heads} query heads cannot be shared by the {size} ranks of a context; their number "
            "must be "
            "a multiple of the ranks"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "queries, keys and values travel together, so they must be of one dtype, not "
            f"{q.dtype}, "
            f"{k.dtype} and {v.dtype}; cast them before attention"
        )
    copies = math.lcm(key_heads, size) // key_heads
    if copies > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2) for x in (k, v))
    parts = [
        x.unflatten(1, (size, -1)).flatten(2).transpose(0, 1) for x in (q, k, v)
    ]  # [size, T / size, columns]
    found = swap_parts(torch.cat(parts, dim=-1), context.name).flatten(0, 1)
    q, k, v = (
        part.unflatten(1, (-1, x.shape[2]))
        for part, x in zip(
            found.split([part.shape[2] for part in parts], dim=1), (q, k, v), strict=True
        )
    )
    return q, k, v


def own_heads_back(out: Tensor, context: ContextGroup | None) -> Tensor:
    """The way back: out [T, H / size, D], all rows of this rank's heads -> this rank's rows of all
    heads [T / size, H, D]; out itself without a context."""
    if context is None:
        return out
    size = context.size
    parts = swap_parts(out.flatten(1).unflatten(0, (size, -1)), context.name)
    return parts.transpose(0, 1).flatten(1).unflatten(1, (size * out.shape[1], -1))


def total(x: Tensor, context: ContextGroup | None) -> Tensor:
    """The sum of all ranks' x, a new tensor; x itself without a context. Collective. Not
    differentiable."""
    return x if context is None else _total(x.detach(), context.name)


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of this name: as torch's own operations on groups find it."""
    return _resolve_process_group(cast(Any, name))


@torch.library.custom_op("packgraph::swap_parts", mutates_args=())
def swap_parts(x: Tensor, group: str) -> Tensor:
    """x [ranks, ...]: x[r] goes to rank r; the result, of the same shape, has at [r] what rank r
    sent.

    group: name of the process group. Collective. Differentiable: gradients go the other way,
    nothing is added up.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group_of(group))
    return out


swap_parts.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))


swap_parts.register_autograd(
    lambda ctx, grad: (swap_parts(grad, *ctx.constants), None), setup_context=save_constants
)


@torch.library.custom_op("packgraph::total_over_ranks", mutates_args=())
def _total(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group_of(group))
    return out


_total.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
