"""The kernel behind `ops/attention/clear_rows.py`: reads masks, writes rows that they name."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 256  # of a program: rows that it looks at, elements that it writes at once


@triton.jit
def _clear_some(  # type: ignore[no-untyped-def]
    x, mask, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Clear those of ROWS rows that the mask names."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    named = tl.load(mask + row, mask=row < rows, other=0) != 0
    if tl.max(named.to(tl.int32), 0) > 0:
        begin = row.to(tl.int64)[:, None] * stride
        zeros = tl.zeros([ROWS, COLUMNS], x.dtype.element_ty)
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            tl.store(x + begin + column, zeros, mask=named[:, None] & (column < WIDTH))


@triton.jit
def _clear(  # type: ignore[no-untyped-def]
    one, other, third, mask_1, mask_2, mask_3, rows_1, rows_2, rows_3,
    stride_1, stride_2, stride_3,
    WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_3: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        _clear_some(one, mask_1, rows_1, stride_1, WIDTH_1, ROWS, COLUMNS)
    elif which == 1:
        _clear_some(other, mask_2, rows_2, stride_2, WIDTH_2, ROWS, COLUMNS)
    else:
        _clear_some(third, mask_3, rows_3, stride_3, WIDTH_3, ROWS, COLUMNS)


def clear(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Set rows of at most three tensors [T, ...] to zero where masks, bool [T], say so. What
    belongs to a row must be adjacent."""
    found = [(x, mask) for x, mask in zip(tensors, masks, strict=True) if x.numel()]
    if not found:  # a grid of no programs is an error
        return
    assert len(found) <= 3, "one launch has places for three tensors"
    three = [found[min(number, len(found) - 1)] for number in range(3)]
    _clear[(triton.cdiv(max(x.shape[0] for x, _ in found), ROWS), len(found))](
        *(x for x, _ in three),
        *(mask for _, mask in three),
        *(x.shape[0] for x, _ in three),
        *(x.stride(0) for x, _ in three),
        *(x[0].numel() for x, _ in three),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
