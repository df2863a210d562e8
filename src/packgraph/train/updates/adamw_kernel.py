"""AdamW of weights narrower than float32 in one kernel: of an element 16 bytes are read (gradient,
master, two means) and 14 written (all but the gradient).

By torch's fused AdamW it takes three kernels, which move 40: a clipped float32 copy of the
gradient, the update, and the copy of the master to the weight. Nothing is atomic and elements know
nothing of each other, so bits do not depend on how a span is cut.

The operations it replaces are its specification: `naive_adamw` in updates/adamw.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program
WARPS = 8


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    parameters, gradients, masters, means, squares, scale, decay, rate, root, blocked, size,
    beta1, rest1, beta2, rest2, eps, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(blocked) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        master = tl.load(masters + at, mask=inside, other=0.0)
        mean = beta1 * tl.load(means + at, mask=inside, other=0.0) + rest1 * gradient
        square = beta2 * tl.load(squares + at, mask=inside, other=0.0)
        square = square + rest2 * gradient * gradient
        if DECAYS:
            master = master - tl.load(decay) * master
        master = master - tl.load(rate) * mean / (tl.sqrt(square) / tl.load(root) + eps)
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(masters + at, master, mask=inside)
        tl.store(parameters + at, master.to(parameters.dtype.element_ty), mask=inside)


@torch.library.custom_op(
    "packgraph::narrow_adamw", mutates_args=("parameters", "masters", "means", "squares")
)
def kernel_adamw(
    parameters: Tensor,
    gradients: Tensor,
    masters: Tensor,
    means: Tensor,
    squares: Tensor,
    scale: Tensor,
    decay: Tensor,
    rate: Tensor,
    root: Tensor,
    blocked: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decays: bool,
) -> None:
    """Update once, if not blocked.

    parameters, gradients: [size], contiguous; gradients may be float32. masters, means, squares:
    float32 [size]. scale .. blocked: float32 [1], as in `Numbers`. One operation for torch.compile
    and for checks of captures.
    """
    size = masters.numel()
    if not size:  # a grid of no programs is an error
        return
    _adamw[(triton.cdiv(size, BLOCK),)](
        parameters,
        gradients,
        masters,
        means,
        squares,
        scale,
        decay,
        rate,
        root,
        blocked,
        size,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        DECAYS=decays,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
