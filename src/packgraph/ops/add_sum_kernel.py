"""The kernel behind `ops/add_sum.py`: three numbers read for one that is written."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # elements and warps of a program


@triton.jit
def _add(total, one, other, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(one + at, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    found = found.to(total.dtype.element_ty).to(tl.float32)
    found += tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


@torch.library.custom_op("packgraph::add_sum_of_two", mutates_args=("total",))
def add_sum_of_two(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one + other, the sum of both rounded before it is added. All [size], contiguous, of
    one dtype of at most 32 bits."""
    size = total.numel()
    if size:  # a grid of no programs is an error
        _add[(triton.cdiv(size, BLOCK),)](total, one, other, size, BLOCK=BLOCK, num_warps=WARPS)
