"""Rows of an embedding, and the gradient of its matrix by the rows that were looked up.

    forward     indices [T] ── rows of the matrix [V, H] ──▶ [T, H]
    backward    gradient [T, H] ── summed by index ──▶ those rows of the matrix's gradient

The gradient of a lookup is a matrix as large as the vocabulary of which T rows at most are not
zero. Compiled code adds these rows to the weight's `.grad` (`add_embedding_gradient`, which
graphs/compiled/products.py puts in place of `embedding_gradient`) and never makes the matrix. On
CUDA rows are sorted by index and summed in float32 in the order of the row by a kernel of Triton:

    sorted indices   2 2 2 5 9 9     a program for each place; the first of an index sums its rows,
                     ^     ^ ^       ROWS at a time, and adds the sum, rounded, to the matrix

Nothing is atomic, so sums repeat bitwise. Most indices occur once: their row is read beside them,
without a loop.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.kernels import has_kernel, tl, triton

PADDING_INDEX = -1
ROWS, COLUMNS = 8, 512  # of the tile that is summed at once


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows [T, H] of `weight` [V, H] for `indices`, int64 [T].

    For `PADDING_INDEX` the result is some row of the matrix, which gets no gradient. All others
    must be in [0, V). Differentiable in `weight`.
    """
    return _Rows.apply(indices, weight)


def naive_embedding_gradient(grad: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """The specification: sums in float32, rounded once. torch's own, which repeats bitwise on CUDA,
    too."""
    counted = grad.masked_fill((indices == PADDING_INDEX)[:, None], 0.0)
    wide = counted.to(torch.promote_types(grad.dtype, torch.float32))
    sums = torch.ops.aten.embedding_dense_backward(
        wide, indices.clamp(min=0), weight.shape[0], PADDING_INDEX, False
    )
    return sums.to(weight.dtype)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices, weight)
        return F.embedding(indices.clamp(min=0), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        indices, weight = ctx.saved_tensors
        return None, embedding_gradient(grad, indices, weight)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    total, grad, indices, rows, count, stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    index = tl.load(indices + place)
    before = tl.load(indices + place - 1, mask=place > 0, other=-1)
    after = tl.load(indices + place + 1, mask=place + 1 < count, other=-1)
    if (index >= 0) & (index != before):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        there = total + index * stride + column
        sum_before = tl.load(there, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(rows + place) * WIDTH + column
        found = tl.load(grad + first, mask=inside, other=0.0).to(tl.float32)
        begin = tl.where(after == index, place + 1, count)
        while begin < count:
            at = begin + tl.arange(0, ROWS)
            same = tl.load(indices + at, mask=at < count, other=-1) == index
            row = tl.load(rows + at, mask=same, other=0)
            where = row[:, None] * WIDTH + column[None, :]
            value = tl.load(grad + where, mask=same[:, None] & inside[None, :], other=0.0)
            found += tl.sum(value.to(tl.float32), 0)
            begin = tl.where(tl.sum(same.to(tl.int32), 0) == ROWS, begin + ROWS, count)
        kind = total.dtype.element_ty
        tl.store(there, (sum_before + found.to(kind).to(tl.float32)).to(kind), mask=inside)


def add_rows(total: Tensor, grad: Tensor, indices: Tensor, rows: Tensor) -> None:
    """total[indices[i]] += grad[rows[i]], summed by index first; those below 0 are left out.

    total: [V, H], rows contiguous. grad: [T, H], contiguous. indices: int64 [T], ascending. rows:
    int64 [T], where they came from, ascending for each index.
    """
    count, width = grad.shape
    if count:  # a grid of no programs is an error
        _add[(count, triton.cdiv(width, COLUMNS))](
            total,
            grad,
            indices,
            rows,
            count,
            total.stride(0),
            WIDTH=width,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )


@torch.library.custom_op("packgraph::embedding_gradient", mutates_args=())
def embedding_gradient(grad: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """Gradient [V, H] of `weight` from grad [T, H] of its dtype."""
    if not has_kernel(grad):
        return naive_embedding_gradient(grad, indices, weight)
    total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    _add_sorted(total, grad, indices)
    return total


@torch.library.custom_op("packgraph::add_embedding_gradient", mutates_args=("total",))
def add_embedding_gradient(total: Tensor, grad: Tensor, indices: Tensor, weight: Tensor) -> None:
    """total [V, H], contiguous, += `embedding_gradient(grad, indices, weight)`.

    The bits are the same but for the sign of zeros where total has the weight's dtype; sums for a
    float32 total are not rounded to a narrower one. Only rows that were looked up are read and
    written. weight: whose gradient it is, by which compiled code finds `total`.
    """
    if has_kernel(grad):
        _add_sorted(total, grad, indices)
    else:
        total.add_(naive_embedding_gradient(grad, indices, total))


def _add_sorted(total: Tensor, grad: Tensor, indices: Tensor) -> None:
    ordered, rows = torch.sort(indices, stable=True)
    # Compiled code chooses strides by itself for what an operation reads that was put in later.
    add_rows(total, grad.contiguous(), ordered, rows)


embedding_gradient.register_fake(
    lambda grad, indices, weight: torch.empty_like(weight, memory_format=torch.contiguous_format)
)
