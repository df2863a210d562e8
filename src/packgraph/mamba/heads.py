"""Scans over rows spread over ranks: exchange rows for heads before them, and back after them.

    rank 0   tokens 0 1 of heads a b c d   --parts to all ranks-->   tokens 0 1 2 3 of heads a b
    rank 1   tokens 2 3 of heads a b c d   <--and back----------     tokens 0 1 2 3 of heads c d

As attention does it (ops/attention/context.py): convolution and recurrence, of Mamba-2 or of a
delta rule, work on whole documents, of some heads, so neither their metadata nor their numbers
depend on the ranks, and no state is sent. What heads of a group have in common (the projections
into and out of the state; queries and keys) goes to every rank that has some of these heads. The
invariant: gradients of what was sent to several ranks are summed in the order of ranks, nothing is
atomic. Parameters are whole on every rank; each uses its part of them, and the sum of their
gradients over ranks is the gradient.

Without a context every function here returns what it is given.
"""

import math

import torch
from torch import Tensor

from packgraph.mamba.shape import ScanShape, own_shape, ranks_problem
from packgraph.ops.attention.context import ContextGroup, swap_parts


def whole_scan_rows(
    columns: Tensor, steps: Tensor, shape: ScanShape, context: ContextGroup | None
) -> tuple[Tensor, Tensor, ScanShape]:
    """All rows of this rank's heads of all heads of this rank's rows, in one exchange. Collective.

    columns: [T / size, heads * head_dim + 2 * groups * state], of all heads and of both projections
    of all groups, in the order that `shape` says; steps: [T / size, heads], of the same dtype.
    Returns both for this rank's heads, [T, ...], and the shape of those. Raises ValueError where
    the ranks cannot share the heads, and where rows are not cut by ulysses.
    """
    if context is None:
        return columns, steps, shape
    if context.kind != "ulysses":
        raise ValueError(
            f"rows cut in {context.kind} cannot be scanned in their order; use ulysses"
        )
    if problem := ranks_problem(shape, context.size):
        raise ValueError(problem)
    parts = [
        part.transpose(1, 2) for part in _by_rank(columns.t(), shape, context.size)
    ]  # [size, T / size, part]
    parts.append(steps.unflatten(1, (context.size, -1)).transpose(0, 1))
    found = swap_parts(torch.cat(parts, dim=-1), context.name).flatten(0, 1)
    own = own_shape(shape, context.size)
    columns, steps = found.split((found.shape[1] - own.heads, own.heads), dim=1)
    return columns, steps, own


def whole_heads(x: Tensor, context: ContextGroup | None) -> Tensor:
    """All rows of this rank's heads [T, heads / size, ...] of x [T / size, heads, ...]. Collective.
    The way back is `own_heads_back`."""
    if context is None:
        return x
    parts = x.unflatten(1, (context.size, -1)).transpose(0, 1)
    return swap_parts(parts, context.name).flatten(0, 1)


def own_channels(x: Tensor, shape: ScanShape, context: ContextGroup | None) -> Tensor:
    """This rank's part of x [channels, ...]: a weight with an entry for each of `columns`, in the
    order of its own."""
    if context is None:
        return x
    return torch.cat([part[context.place] for part in _by_rank(x, shape, context.size)])


def own_heads(x: Tensor, context: ContextGroup | None) -> Tensor:
    """This rank's part of x [heads], a view."""
    if context is None:
        return x
    heads = x.shape[0] // context.size
    return x.narrow(0, context.place * heads, heads)


def _by_rank(x: Tensor, shape: ScanShape, ranks: int) -> list[Tensor]:
    """x [channels, ...] as what each rank gets of the heads and of the two projections: three of
    [ranks, part, ...], in the order of x."""
    found = []
    for part, (count, _) in zip(x.split(shape.columns), shape.parts, strict=True):
        copies = math.lcm(count, ranks) // count  # 1 of heads
        if copies > 1:
            each = part.unflatten(0, (count, 1, -1))
            part = each.expand(-1, copies, *(-1,) * x.dim()).flatten(0, 2)
        found.append(part.unflatten(0, (ranks, -1)))
    return found
