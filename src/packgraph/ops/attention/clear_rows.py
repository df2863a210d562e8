"""Rows of padding set to zero, where they are.

    attention kernel ──▶ rows of documents | rows of padding, unwritten ──▶ zeros

The kernels of attention leave rows of padding unwritten. A masked copy of what they wrote would
read and write all of it again for the sake of a few rows; on CUDA a kernel of Triton reads the mask
and writes rows of padding alone. Its bits are those of `naive_clear_rows`.
"""

from collections.abc import Sequence

from torch import Tensor

from packgraph.ops.kernels import HAS_TRITON, tl, triton

ROWS, COLUMNS = 16, 256  # of a program: rows that it looks at, elements that it writes at once


def naive_clear_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The specification: a new tensor, nothing is written."""
    return x.masked_fill(mask.view(-1, *[1] * (x.dim() - 1)), 0)


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


def clear_rows(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Set rows of each of at most three tensors to zero where its mask says so, in place.

    Args:
        tensors: [T, ...] each, of any dtype and lengths of their own.
        masks: bool [T] for each, True where a row is cleared.
    """
    whole = all(x[:1].is_contiguous() for x in tensors) and all(m.is_contiguous() for m in masks)
    if HAS_TRITON and whole and all(x.is_cuda for x in tensors):
        clear(tensors, masks)
        return
    for x, mask in zip(tensors, masks, strict=True):
        x.copy_(naive_clear_rows(x, mask))
