"""Kernels for a[rows of e] @ matrix[e]: what `product` (products.py) means.

By descriptors (TMA, Hopper), `multiply_by_descriptors`:

With a hundred rows per expert the time is that of reading the matrices. Tiles of the result are as
high as most experts have rows, so a matrix is read about once; where an expert has more, its tiles
of the same columns are made side by side and share what the second-level cache has. Programs stay
and go from tile to tile in one flat loop over steps, so the loads of a tile are under way while the
one before is finished (picture in ops/grouped_gemm/add_kernel.py).

Tiles are counted on the device: expert e has ceil(rows / ROWS) * columns of them, one without rows
has none. Rows read beyond an expert's end fill a tile and reach no other row; they are not written,
because the descriptor of the result has its bounds where the expert ends ("ragged", see there).

By pointers, `multiply_by_pointers`: float32, float16 and bfloat16, any widths, every GPU that
Triton compiles for, where neither torch's grouped product nor descriptors can be taken. One program
makes one tile of rows of one expert. How many tiles there are only the device knows; so there are
programs for as many as there can be, and each looks up in the running sum of tiles whether it has
one, and whose:

    rows of experts    70   0   10   64        tiles of 64    2  0  1  1        program 0 1 | 2 | 3 | 4 ...
                                               running sum    2  2  3  4                e0  |e2 |e3 | nothing to do

Products of float32 numbers are those of float32, not of TF32.
"""  # noqa: E501

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from packgraph.ops.grouped_gemm.configs import Multiplied


@triton.jit
def _tiles(offsets, experts, wide, ROWS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of tiles of the result."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    starts = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    return tl.sum(tl.where(expert < experts, tl.cdiv(ends - starts, ROWS), 0), 0) * wide


@triton.jit
def _multiply_tiles(  # type: ignore[no-untyped-def]
    out,
    a,
    matrices,
    offsets,
    experts,
    inner,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    wide, steps_of_tile = tl.cdiv(columns, COLUMNS), tl.cdiv(inner, INNER)
    program, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.cdiv(tl.maximum(_tiles(offsets, experts, wide, ROWS, EXPERTS) - program, 0), programs)
    tile, step = program - programs, steps_of_tile - 1
    expert, before, start, end, row, j = -1, 0, 0, 0, 0, 0  # before: tiles of earlier experts
    high = 0
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in tl.range(0, mine * steps_of_tile):
        step += 1
        if step == steps_of_tile:
            step = 0
            tile += programs
            while tile >= before + high * wide:
                before += high * wide
                expert += 1
                start = end
                end = tl.load(offsets + expert)
                high = tl.cdiv(end - start, ROWS)
            row = (tile - before) % high * ROWS
            j = (tile - before) // high * COLUMNS
        x = a.load([start + row, step * INNER])
        if TRANSPOSED:
            y = tl.trans(tl.reshape(matrices.load([expert, j, step * INNER]), (COLUMNS, INNER)))
        else:
            y = tl.reshape(matrices.load([expert, step * INNER, j]), (INNER, COLUMNS))
        acc = tl.dot(x, y, acc)
        if step == steps_of_tile - 1:
            beyond, bound, place = to_ragged_indices(start, end - start, row)
            out.store(
                [beyond, bound, place, j], tl.reshape(acc.to(out.dtype), (1, 1, ROWS, COLUMNS))
            )
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


def multiply_by_descriptors(
    a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool, way: Multiplied, programs: int
) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`; undefined from
    offsets[-1] on.

    offsets: int32 [E], contiguous; R up to 2 ** 30. `describable` (ops/grouped_gemm/configs.py)
    must hold for a and matrices, and a row of the result fill a multiple of 16 bytes. programs: how
    many run at the same time.
    """
    experts, inner, columns = matrices.shape[0], a.shape[1], matrices.shape[1 if transposed else 2]
    out = a.new_empty(a.shape[0], columns)
    rows = TensorDescriptor.from_tensor(a, [way.rows, way.inner])
    block = [1, way.columns, way.inner] if transposed else [1, way.inner, way.columns]
    _multiply_tiles[(programs,)](
        create_ragged_descriptor(out, [way.rows, way.columns]),
        rows,
        TensorDescriptor.from_tensor(matrices, block),
        offsets,
        experts,
        inner,
        columns,
        ROWS=way.rows,
        COLUMNS=way.columns,
        INNER=way.inner,
        EXPERTS=triton.next_power_of_2(experts),
        TRANSPOSED=transposed,
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out


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
