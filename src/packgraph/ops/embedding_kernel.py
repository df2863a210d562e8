"""Rows summed by index and added to a matrix: the kernel behind `ops/embedding.py`.

    sorted indices   2 2 2 5 9 9     a program for each place; the first of an index sums its rows,
                     ^     ^ ^       ROWS at a time, and adds the sum, rounded, to the matrix

Most indices occur once: their row is read beside them, without a loop.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 512  # of the tile that is summed at once


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
