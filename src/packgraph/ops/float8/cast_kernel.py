"""Casts to float8 by Triton: what `cast.py` specifies, bit by bit.

    rows       a program per row: the largest absolute value, then the codes; the second pass finds
               the row in the cache
    columns    largest absolute values, of several tiles below each other in a program, joined by an
               atomic maximum, whose result does not depend on the order; then a program per tile
               casts it and writes it turned around

Largest values are found among the bits of absolute values, as integers: numbers are ordered alike,
and NaN, the largest, is not passed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.ops.float8.cast import CODES

ROW_BLOCK = 4096
TILE_ROWS, TILE_COLUMNS = 128, 64  # a program for each: many loads are under way at once
LARGEST_ROWS, LARGEST_COLUMNS, LARGEST_TILES = 32, 128, 8  # a program has so many such tiles


@triton.jit
def _absolute_bits(value):  # type: ignore[no-untyped-def]
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scales_of(bits):  # type: ignore[no-untyped-def]
    """Scale and inverse, as cast.py has them."""
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


@cast_columns.register_fake
def _column_shapes(
    x: Tensor, taken: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    return _empty_columns(x, multiple)
