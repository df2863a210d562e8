"""RMSNorm, the addition before it and its backward by Triton: what `ops/norm.py` specifies.

    forward     a program has some whole rows: one reading of x (and of what is added), one writing
    backward    a program goes over some tiles of rows: one reading of x and of the gradients, one
                writing of x's gradient; what the rows add to the weight's gradient stays in
                registers and leaves as one partial sum [W] in float32
    then        partial sums of all programs are added in their order, rounded once

The mean of squares is computed again in the backward, from the row that is there anyway. How many
programs there are, and which rows each has, follows from shapes alone. Nothing is atomic, so
results repeat bitwise. Rows may be strided, numbers of a row are adjacent.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.ops.grouped_gemm.configs import aligned
from packgraph.ops.norm_configs import Normed

PARTS, PART_COLUMNS = 64, 32  # tile of the partial sums that are added at once
NUMBERS_OF_THREAD = 16


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, branch, weight, normed, total, rows, eps, x_stride, branch_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    place = row.to(tl.int64)[:, None]
    value = tl.load(x + place * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(branch + place * branch_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place * WIDTH + column, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the backward finds
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    found = value * scale * factor
    tl.store(normed + place * WIDTH + column, found.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, residual, x, weight, of_x, partial, rows, steps, eps,
    grad_stride, residual_stride, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    real = column < WIDTH
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        there = (row < rows)[:, None]
        inside = there & real
        place = row.to(tl.int64)[:, None]
        value = tl.load(x + place * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        incoming = tl.load(grad + place * grad_stride + column, mask=inside, other=0.0).to(
            tl.float32
        )
        scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        unit = value * tl.where(there, scale, 0.0)  # without eps, rows behind the end are NaN
        if WEIGHT:
            sums += incoming * unit
        incoming = incoming * factor
        mean = (tl.sum(incoming * unit, 1) / WIDTH)[:, None]
        other = tl.load(residual + place * residual_stride + column, mask=inside, other=0.0)
        found = scale * (incoming - unit * mean) + other.to(tl.float32)
        tl.store(of_x + place * WIDTH + column, found.to(of_x.dtype.element_ty), mask=inside)
    if WEIGHT:
        own = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
        tl.store(partial + own, tl.sum(sums, 0), mask=tl.arange(0, BLOCK) < WIDTH)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    partial, first, second, parts, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([PARTS, COLUMNS], tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (column < WIDTH)[None, :]
        place = part.to(tl.int64)[:, None] * WIDTH + column[None, :]
        sums += tl.load(partial + place, mask=inside, other=0.0)
    found = tl.sum(sums, 0)
    tl.store(first + column, found.to(first.dtype.element_ty), mask=column < SIZE)
    behind = (column >= SIZE) & (column < WIDTH)
    tl.store(second + (column - SIZE), found.to(second.dtype.element_ty), mask=behind)


def add_parts(partial: Tensor, first: Tensor, second: Tensor) -> None:
    """Fill first [S] and second [W - S] with the sum of partial, float32 [P, W], over P. With S = W
    second gets nothing."""
    parts, width = partial.shape
    _add_parts[(triton.cdiv(width, PART_COLUMNS),)](
        partial,
        first,
        second,
        parts,
        SIZE=first.numel(),
        WIDTH=width,
        PARTS=PARTS,
        COLUMNS=PART_COLUMNS,
        num_warps=4,
    )


def normalise(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    total: Tensor | None,
    way: Normed,
) -> None:
    """Fill normed and, with a branch, total: contiguous [R, W]. x, branch: [R, W]; weight: [W]."""
    x, branch = by_rows(x), None if branch is None else by_rows(branch)
    (rows, width), tile = x.shape, _tile(x.shape[1], way)
    if rows:
        _forward[(triton.cdiv(rows, tile["ROWS"]),)](
            x,
            x if branch is None else branch,
            aligned(weight.contiguous()),
            normed,
            normed if total is None else total,
            rows,
            eps,
            x.stride(0),
            0 if branch is None else branch.stride(0),
            WIDTH=width,
            ADDS=branch is not None,
            **tile,
        )


def normalise_backward(
    grad: Tensor,
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    of_x: Tensor,
    of_weight: Tensor | None,
    way: Normed,
) -> None:
    """Fill of_x, contiguous [R, W], and of_weight [W]. grad, residual and x: [R, W]; R > 0."""
    grad, residual, x = by_rows(grad), by_rows(residual), by_rows(x)
    (rows, width), tile = x.shape, _tile(x.shape[1], way)
    tiles = triton.cdiv(rows, tile["ROWS"])
    steps = triton.cdiv(tiles, way.programs)
    programs = triton.cdiv(tiles, steps)
    partial = x.new_empty(0 if of_weight is None else programs, width, dtype=torch.float32)
    _backward[(programs,)](
        grad,
        residual,
        x,
        aligned(weight.contiguous()),
        of_x,
        partial,
        rows,
        steps,
        eps,
        grad.stride(0),
        residual.stride(0),
        x.stride(0),
        WIDTH=width,
        WEIGHT=of_weight is not None,
        **tile,
    )
    if of_weight is not None:
        add_parts(partial, of_weight, of_weight)


def by_rows(x: Tensor) -> Tensor:
    """x [R, ...], or a copy in which what belongs to a row is adjacent and in order, and which
    begins where kernels like it: the order of their sums follows from shapes and strides alone."""
    return aligned(x if x[:1].is_contiguous() else x.contiguous())


def warps_for(numbers: int) -> int:
    """Of a program that holds so many numbers of each tensor, a power of two."""
    return min(max(numbers // (32 * NUMBERS_OF_THREAD), 1), 16)


def _tile(width: int, way: Normed) -> dict[str, int]:
    """What a launch says of the tile [ROWS, BLOCK] of a program."""
    block = triton.next_power_of_2(width)
    rows = max(way.elements // block, 1)
    return {"BLOCK": block, "ROWS": rows, "num_warps": warps_for(rows * block)}
