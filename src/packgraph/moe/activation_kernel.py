"""The experts' activation and its backward as one kernel each; the operations in moe/experts.py
are their meaning.

How many rows there are is looked up on the device (the last offset): programs behind it read
nothing and, but for the zero gradients of weights, write nothing. The backward goes over a row from
left to right in one program, so the gradient of its weight is a sum in a fixed order. Whether there
is a gate is known when a kernel is compiled.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 4, 512


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    h,
    weights,
    offsets,
    out,
    experts,
    width,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
):
    total = tl.load(offsets + experts - 1)
    if tl.program_id(0) * ROWS < total:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < total)[:, None] & (column < width)[None, :]
        here = h + row.to(tl.int64)[:, None] * stride + column[None, :]
        first = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weights + row, mask=row < total, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(here + width, mask=mask, other=0.0).to(tl.float32)
            plain = first / (1.0 + tl.exp(-first)) * up
        else:
            plain = tl.where(first <= 0.0, 0.0, first * first)  # NaN stays NaN
        tl.store(
            out + row.to(tl.int64)[:, None] * width + column[None, :],
            plain * weight[:, None],
            mask=mask,
        )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad,
    h,
    weights,
    offsets,
    of_h,
    of_weights,
    act,
    experts,
    rows,
    stride,
    grad_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
):
    total = tl.load(offsets + experts - 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None]
    dot = tl.zeros([ROWS], tl.float32)
    if tl.program_id(0) * ROWS < total:
        weight = tl.load(weights + row, mask=row < total, other=0.0).to(tl.float32)[:, None]
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            mask = (row < total)[:, None] & (column < WIDTH)
            incoming = tl.load(grad + place * grad_stride + column, mask=mask, other=0.0).to(
                tl.float32
            )
            here = tl.load(h + place * stride + column, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(h + place * stride + column + WIDTH, mask=mask, other=0.0).to(
                    tl.float32
                )
                chance = 1.0 / (1.0 + tl.exp(-here))
                silu = here * chance
                plain = silu * up
                of_gate = incoming * weight * up * (chance * (1.0 + here * (1.0 - chance)))
                tl.store(of_h + place * (2 * WIDTH) + column, of_gate, mask=mask)
                tl.store(
                    of_h + place * (2 * WIDTH) + column + WIDTH, incoming * weight * silu, mask=mask
                )
            else:
                kept = tl.where(here <= 0.0, 0.0, here)
                plain = kept * kept
                tl.store(of_h + place * WIDTH + column, incoming * weight * (2.0 * kept), mask=mask)
            dot += tl.sum(incoming * plain, 1)
            tl.store(act + place * WIDTH + column, plain * weight, mask=mask)
    tl.store(of_weights + row, dot, mask=row < rows)


def activate(h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True) -> Tensor:
    """Launches `activation`: [R, I]."""
    h = _by_rows(h)
    rows, width = h.shape[0], h.shape[1] // 2 if gated else h.shape[1]
    out = h.new_empty(rows, width)
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _forward[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, columns))](
            h,
            weights.contiguous(),
            offsets.contiguous(),
            out,
            offsets.shape[0],
            width,
            h.stride(0),
            ROWS=TILE_ROWS,
            COLUMNS=columns,
            GATED=gated,
        )
    return out


def activate_backward(
    grad: Tensor, h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `activation_backward`: gradients of h and weights [R], and the activation [R, I]."""
    h, grad = _by_rows(h), _by_rows(grad)
    rows, width = grad.shape
    of_h, of_weights, act = (
        h.new_empty(h.shape),
        weights.new_empty(rows),
        grad.new_empty(rows, width),
    )
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _backward[(triton.cdiv(rows, TILE_ROWS),)](
            grad,
            h,
            weights.contiguous(),
            offsets.contiguous(),
            of_h,
            of_weights,
            act,
            offsets.shape[0],
            rows,
            h.stride(0),
            grad.stride(0),
            WIDTH=width,
            ROWS=TILE_ROWS,
            COLUMNS=columns,
            GATED=gated,
        )
    return of_h, of_weights, act


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
