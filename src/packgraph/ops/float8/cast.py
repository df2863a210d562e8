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
what makes x. The others run one kernel of Triton (`cast_kernel.py`) where there is one, with the
same bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON

CODES = torch.float8_e4m3fn
BIAS, MANTISSA_BITS = 127, 23  # of float32
SMALLEST = BIAS - 64  # exponent, with bias, of what smaller rows are taken for
TOP_EXPONENT, TOP_MANTISSA = 8, 0x600000  # 448 = 1.75 * 2^8
NOT_FINITE = 255
SMALLEST_INVERSE = 2.0 ** (SMALLEST - TOP_EXPONENT - BIAS)  # of rows that are zero, or below 2^-64
BLOCK = 32  # numbers of a row that share a scale in MXFP8
TILE_ROWS, TILE_COLUMNS = 128, 4  # of scales, as torch's SWIZZLE_32_4_4 has them


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


def rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same as `naive_rows_to_float8`, bit by bit."""
    if torch.compiler.is_compiling() or not _has_kernel(x):
        return naive_rows_to_float8(x)
    from packgraph.ops.float8.cast_kernel import cast_rows

    return cast_rows(x.contiguous())


def columns_to_float8(
    x: Tensor, taken: Tensor | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns the same as `naive_columns_to_float8`, bit by bit."""
    if not _has_kernel(x):
        return naive_columns_to_float8(x, taken, multiple)
    from packgraph.ops.float8.cast_kernel import cast_columns

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
    padded = F.pad(scales, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, TILE_COLUMNS))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)


def _has_kernel(x: Tensor) -> bool:
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


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
