"""Numbers rounded to float8 (e4m3), with one scale for each row, each column or each block.

    rows       x [R, C]  ->  codes [R, C],   inverse [R, 1]        x ~ codes * inverse
    columns    x [R, C]  ->  codes [C, R],   inverse [C, 1]        x^T ~ codes * inverse
    stacks     x [E, R, C] alike, matrix by matrix
    blocks     x [R, C]  ->  codes [R, C],   inverse [R, C / 32]   32 columns of a row, as MXFP8

A product in float8 wants both operands in rows of what is summed over, so that a matrix whose
columns are summed over is cast and turned around in one pass. Where columns are summed over tokens,
some rows may take no part (`taken`), as if they were zero: rows of padding then change no scale,
whatever they hold. Zeros behind the last row fill up what products want a `multiple` of.

A scale is the largest power of two with which no number of its row exceeds 448, the largest of
e4m3. Powers of two make casts exact but for the rounding of the codes: a code times its inverse has
no rounding of its own, in bfloat16 neither. A row below 2^-64 is cast as if it had a number of that
size, and a row that holds an infinity or NaN becomes NaN as a whole, so that neither is lost. Rows
know nothing of each other. All of it goes for blocks, too, each of which is cast as a row of its
own: MXFP8 (OCP Microscaling Formats 1.0) with scales rounded up, so that nothing saturates.

The functions with `naive_` are the specification, and what compilers trace, which fuse them with
what makes x. The others run kernels of Triton where there are some, with the same bits:

    rows       a program per row: the largest absolute value, then the codes; the second pass finds
               the row in the cache
    columns    largest absolute values, of several tiles below each other in a program, joined by an
               atomic maximum, whose result does not depend on the order; then a program per tile
               casts it and writes it turned around

Largest values are found among the bits of absolute values, as integers: numbers are ordered alike,
and NaN, the largest, is not passed over.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.kernels import has_kernel, tl, triton

CODES = torch.float8_e4m3fn
BIAS, MANTISSA_BITS = 127, 23  # of float32
SMALLEST = BIAS - 64  # exponent, with bias, of what smaller rows are taken for
TOP_EXPONENT, TOP_MANTISSA = 8, 0x600000  # 448 = 1.75 * 2^8
NOT_FINITE = 255
SMALLEST_INVERSE = 2.0 ** (SMALLEST - TOP_EXPONENT - BIAS)  # of rows that are zero, or below 2^-64
BLOCK = 32  # numbers of a row that share a scale in MXFP8
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # of scales, as torch's SWIZZLE_32_4_4 has them
ROW_BLOCK = 4096
TILE_ROWS, TILE_COLUMNS = 128, 64  # a program for each: many loads are under way at once
LARGEST_ROWS, LARGEST_COLUMNS, LARGEST_TILES = 32, 128, 8  # a program has so many such tiles


def naive_rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """codes of x's shape and inverse float32 [..., R, 1], a scale for each row of x [..., R, C]."""
    wide = x.to(torch.float32)
    # As integers, bits of absolute values are ordered like these, and NaN, the largest, is not
    # passed over by any compiler's maximum.
    scale, inverse = _scales(wide.abs().view(torch.int32).amax(-1, keepdim=True))
    return (wide * scale).to(CODES), inverse


def naive_columns_to_float8(
    x: Tensor, taken: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """codes [..., C, R] and inverse float32 [..., C, 1], a scale for each column of x [..., R, C].

    taken: bool [R, 1], rows that take part; None = all do. multiple: R grows to one of it by zeros.
    """
    if taken is not None:
        x = torch.where(taken, x, 0.0)
    return naive_rows_to_float8(F.pad(x.mT, (0, -x.shape[-2] % multiple)).contiguous())


def _scales(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and inverse of rows whose largest absolute values, float32, have these bits."""
    exponent = (bits >> MANTISSA_BITS).clamp(min=SMALLEST)
    above = (bits & ((1 << MANTISSA_BITS) - 1)) > TOP_MANTISSA
    field = exponent - TOP_EXPONENT + above.to(torch.int32)
    finite = exponent < NOT_FINITE
    scale, inverse = (
        (part << MANTISSA_BITS).view(torch.float32) for part in (2 * BIAS - field, field)
    )
    return scale.masked_fill(~finite, torch.nan), inverse.masked_fill(~finite, torch.nan)


@triton.jit
def _absolute_bits(value):  # type: ignore[no-untyped-def]
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scales_of(bits):  # type: ignore[no-untyped-def]
    """Scale and inverse, as `_scales` has them."""
    exponent = tl.maximum(bits >> 23, 63)
    field = exponent - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    not_a_number = 0x7FC00000
    scale = tl.where(exponent < 255, (254 - field) << 23, not_a_number)
    inverse = tl.where(exponent < 255, field << 23, not_a_number)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _rows(x, codes, inverses, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = row * SIZE
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + start + column, mask=column < SIZE, other=0.0)
        largest = tl.maximum(largest, _absolute_bits(value))
    scale, inverse = _scales_of(tl.max(largest, 0))
    tl.store(inverses + row, inverse)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + start + column, mask=column < SIZE, other=0.0).to(tl.float32)
        tl.store(
            codes + start + column, (value * scale).to(codes.dtype.element_ty), mask=column < SIZE
        )


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    x, taken, number, ROWS, COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tile `number` from above of this program's columns of x, zero outside and in rows that take
    no part; where it is."""
    stack = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    row = number * TILE_R + tl.arange(0, TILE_R)
    inside = row < ROWS
    if MASKED:
        inside = inside & (tl.load(taken + row, mask=inside, other=0) != 0)
    place = (stack * ROWS + row[:, None]) * COLUMNS + column[None, :]
    value = tl.load(x + place, mask=inside[:, None] & (column[None, :] < COLUMNS), other=0.0)
    return value, stack, row, column


@triton.jit
def _largest_of_columns(  # type: ignore[no-untyped-def]
    x, taken, largest, ROWS, COLUMNS: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    bits = tl.zeros([TILE_R, TILE_C], tl.int32)
    for number in tl.static_range(TILES):
        at = tl.program_id(1) * TILES + number
        value, _, _, _ = _tile(x, taken, at, ROWS, COLUMNS, TILE_R, TILE_C, MASKED)
        bits = tl.maximum(bits, _absolute_bits(value))
    stack = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    tl.atomic_max(largest + stack * COLUMNS + column, tl.max(bits, 0), mask=column < COLUMNS)


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    x, taken, largest, codes, inverses, ROWS, PADDED, COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    value, stack, row, column = _tile(
        x, taken, tl.program_id(1), ROWS, COLUMNS, TILE_R, TILE_C, MASKED
    )
    bits = tl.load(largest + stack * COLUMNS + column, mask=column < COLUMNS, other=0)
    scale, inverse = _scales_of(bits)
    first = (column < COLUMNS) & (tl.program_id(1) == 0)
    tl.store(inverses + stack * COLUMNS + column, inverse, mask=first)
    turned = tl.trans((value.to(tl.float32) * scale[None, :]).to(codes.dtype.element_ty))
    place = (stack * COLUMNS + column[:, None]) * PADDED + row[None, :]
    tl.store(codes + place, turned, mask=(column[:, None] < COLUMNS) & (row[None, :] < PADDED))


@torch.library.custom_op("packgraph::float8_rows", mutates_args=())
def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: contiguous [..., R, C]. One operation for torch.compile."""
    codes = torch.empty_like(x, dtype=CODES)
    inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    size = x.shape[-1]
    block = min(ROW_BLOCK, triton.next_power_of_2(size))
    if x.numel():
        _rows[(inverse.numel(),)](x, codes, inverse, SIZE=size, BLOCK=block, num_warps=4)
    return codes, inverse


@torch.library.custom_op("packgraph::float8_columns", mutates_args=())
def cast_columns(
    x: Tensor, taken: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """x: contiguous [R, C] or [E, R, C]; taken: bool [R, 1]."""
    codes, inverse = _empty_columns(x, multiple)
    if not x.numel():
        return codes, inverse
    *_, rows, columns = x.shape
    largest = torch.zeros(inverse.shape, dtype=torch.int32, device=x.device)
    padded = codes.shape[-1]
    stacks = x.numel() // (rows * columns)
    facts = {"ROWS": rows, "COLUMNS": columns, "MASKED": taken is not None}
    rows_taken = largest if taken is None else taken.view(torch.uint8)
    below = triton.cdiv(rows, LARGEST_ROWS * LARGEST_TILES)
    _largest_of_columns[(triton.cdiv(columns, LARGEST_COLUMNS), below, stacks)](
        x,
        rows_taken,
        largest,
        TILE_R=LARGEST_ROWS,
        TILE_C=LARGEST_COLUMNS,
        TILES=LARGEST_TILES,
        num_warps=4,
        **facts,
    )
    grid = triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(padded, TILE_ROWS), stacks
    _columns[grid](
        x,
        rows_taken,
        largest,
        codes,
        inverse,
        PADDED=padded,
        TILE_R=TILE_ROWS,
        TILE_C=TILE_COLUMNS,
        num_warps=8,
        **facts,
    )
    return codes, inverse


def _empty_columns(x: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    *stack, rows, columns = x.shape
    codes = x.new_empty((*stack, columns, rows + -rows % multiple), dtype=CODES)
    return codes, x.new_empty((*stack, columns, 1), dtype=torch.float32)


@cast_rows.register_fake
def _row_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x, dtype=CODES), inverse


cast_columns.register_fake(lambda x, taken=None, multiple=1: _empty_columns(x, multiple))


def rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same as `naive_rows_to_float8`, bit by bit."""
    if torch.compiler.is_compiling() or not has_kernel(x):
        return naive_rows_to_float8(x)
    return cast_rows(x.contiguous())


def columns_to_float8(
    x: Tensor, taken: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns the same as `naive_columns_to_float8`, bit by bit."""
    if not has_kernel(x):
        return naive_columns_to_float8(x, taken, multiple)
    return cast_columns(x.contiguous(), taken, multiple)


def blocks_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """codes of x's shape and inverse float32 [..., R, C / 32], a scale for each block of 32 columns
    of a row of x [..., R, C]; C is a multiple of 32."""
    codes, inverse = rows_to_float8(x.unflatten(-1, (-1, BLOCK)))
    return codes.flatten(-2), inverse.squeeze(-1)


def from_float8(codes: Tensor, inverse: Tensor) -> Tensor:
    """Decodes codes [..., R, C] to float32. inverse: [..., R, 1] or [..., R, C / 32]."""
    together = codes.shape[-1] // inverse.shape[-1]
    return codes.to(torch.float32) * inverse.repeat_interleave(together, -1)


def swizzled(inverse: Tensor) -> Tensor:
    """Scales of blocks in the form that products on Blackwell read: e8m0, flat.

    Args:
        inverse: float32 [R, S], powers of two or NaN, which e8m0 holds exactly.

    Returns:
        Tiles of 128 rows and 4 columns, one after the other along a row of tiles, filled up with
        zero bytes; row r and column s of a tile are at place 16 (r % 32) + 4 (r // 32) + s of it.
    """
    scales = inverse.to(torch.float8_e8m0fnu).view(torch.uint8)
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, SCALE_COLUMNS))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)
