"""The kernel behind `ops/scaled_gradient.py`: two numbers read for one that is written."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # elements and warps of a program


@triton.jit
def _add(total, part, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(part + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    found = found.to(total.dtype.element_ty).to(tl.float32)
    found += tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


def add_scaled(total: Tensor, part: Tensor, factor: Tensor) -> None:
    """total += part * factor, the product rounded to total's dtype before it is added. Both
    contiguous, of at most 32 bits. factor: float32, one number."""
    size = total.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        # Unfused, so that a product for a float32 total is rounded, too, as by two operations.
        options = {"num_warps": WARPS, "enable_fp_fusion": False}
        _add[grid](total, part, factor, size, BLOCK=BLOCK, **options)
