"""a[rows of e] @ matrix[e] by pointers: float32, float16 and bfloat16, any widths, every GPU that
Triton compiles for.

What `product` (products.py) means, where neither torch's grouped product nor descriptors can be
taken. One program makes one tile of rows of one expert. How many tiles there are only the device
knows; so there are programs for as many as there can be, and each looks up in the running sum of
tiles whether it has one, and whose:

    rows of experts    70   0   10   64        tiles of 64    2  0  1  1        program 0 1 | 2 | 3 | 4 ...
                                               running sum    2  2  3  4                e0  |e2 |e3 | nothing to do

Products of float32 numbers are those of float32, not of TF32.
"""  # noqa: E501

import triton
import triton.language as tl
from torch import Tensor

from packgraph.moe.grouped_gemm.configs import Multiplied


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    out,
    a,
    matrices,
    offsets,
    experts,
    inner,
    columns,
    a_stride,
    of_expert,
    of_inner,
    of_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    wide = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // wide
    each = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + each, mask=each < experts, other=0)
    starts = tl.load(offsets + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, tl.cdiv(ends - starts, ROWS), 0)
    upto = tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        expert = tl.sum((upto <= tile).to(tl.int32), 0)
        mine = each == expert
        end = tl.sum(tl.where(mine, ends, 0), 0)
        first = tl.sum(tl.where(mine, starts + (tile - upto + tiles) * ROWS, 0), 0)
        row = first.to(tl.int64) + tl.arange(0, ROWS)
        column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, INNER)
        live, there = row < end, column < columns
        from_a = a + row[:, None] * a_stride + k[None, :]
        matrix = matrices + expert.to(tl.int64) * of_expert
        from_matrix = matrix + k[:, None] * of_inner + column[None, :] * of_column
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for done in range(0, inner, INNER):
            within = k < inner - done
            x = tl.load(from_a, mask=live[:, None] & within[None, :], other=0.0)
            y = tl.load(from_matrix, mask=within[:, None] & there[None, :], other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            from_a += INNER
            from_matrix += INNER * of_inner
        tl.store(
            out + row[:, None] * columns + column[None, :], acc, mask=live[:, None] & there[None, :]
        )


def multiply_by_pointers(
    a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool, way: Multiplied
) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`; undefined from
    offsets[-1] on.

    a: of any stride between rows. matrices: contiguous, of a's dtype. offsets: int32 [E],
    contiguous.
    """
    experts, columns = matrices.shape[0], matrices.shape[1 if transposed else 2]
    of_expert, *strides = matrices.stride()
    of_inner, of_column = reversed(strides) if transposed else strides
    out = a.new_empty(a.shape[0], columns)
    tiles = triton.cdiv(a.shape[0], way.rows) + experts  # every expert may leave one tile unfilled
    _multiply[(tiles * triton.cdiv(columns, way.columns),)](
        out,
        a,
        matrices,
        offsets,
        experts,
        a.shape[1],
        columns,
        a.stride(0),
        of_expert,
        of_inner,
        of_column,
        ROWS=way.rows,
        COLUMNS=way.columns,
        INNER=way.inner,
        EXPERTS=triton.next_power_of_2(experts),
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out
