"""Products of rows with the matrix of their expert, sizes on the device.

    rows     a [R, K]   | expert 0 | expert 1 | ... | tail          offsets [E]: where each expert's
                                                                    rows end
    result     [R, N]   | a @ b[0] | a @ b[1] | ... | undefined     (whatever the memory held, NaN
                                                                    among it)

The invariant: nothing reads rows from offsets[-1] on, neither of a nor of an incoming gradient; an
expert without rows has a gradient of exactly 0. The gradient of b has the layout that b has in
memory, so that adding it to `.grad` of a parameter that was passed transposed is an addition of
contiguous tensors.

                   bfloat16, CUDA from 9.0 on     other numbers, widths, CUDA devices    CPU          float64
    product        torch, or by descriptors       by pointers                            torch        masked
    gradient of b  torch; added: by descriptors   by pointers                            torch        masked

`torch.nn.functional.grouped_mm` has no host sync on CUDA in bfloat16 from compute capability 9.0
on; on the CPU it may read the offsets. By descriptors and by pointers are Triton's kernels beside
this file. Masked is one product of all rows per expert, with E times the work: for checks in
float64, and for widths that do not fill 16 bytes on a CPU. `ops/linear.py` makes them
differentiable, and calls them without autocast.
"""  # noqa: E501

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.grouped_gemm.configs import (
    ALIGNMENT,
    HOPPER,
    aligned,
    multiplied_anywhere,
    multiplied_way,
    programs_at_once,
)
from packgraph.ops.triton_found import HAS_TRITON

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def naive_grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The specification: one product after the other, sizes read on the host. Zero in the tail."""
    ends = offsets.tolist()
    parts = [a[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, b)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


def multiply(a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`."""
    a, b = _rows(a), _matrices(matrices, transposed)
    if _by_torch(a, *b.shape[1:]):
        matrices = b.mT if transposed else b
        way = multiplied_way(a, matrices)
        if way.kernel == "torch":
            return F.grouped_mm(a, b, offs=offsets)
        from packgraph.ops.grouped_gemm.multiply_kernel import multiply_by_descriptors

        programs = programs_at_once(a.device, way.programs)
        return multiply_by_descriptors(a, matrices, offsets.contiguous(), transposed, way, programs)
    if _by_kernel(a):
        from packgraph.ops.grouped_gemm.multiply_kernel import multiply_by_pointers

        matrices = b.mT if transposed else b
        return multiply_by_pointers(
            a, matrices, offsets.contiguous(), transposed, multiplied_anywhere(a, matrices)
        )
    total = a.new_zeros(a.shape[0], b.shape[2])
    for matrix, inside in zip(b.unbind(0), _inside(offsets, a.shape[0]), strict=True):
        total = total + torch.where(inside, a, 0) @ matrix
    return total


def matrices_gradient(grad: Tensor, a: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Gradient of matrices: [E, K, N] = a^T grad per expert, or [E, N, K] if `transposed`. grad:
    [R, N]; a: [R, K]."""
    left, right = (_rows(grad), _rows(a)) if transposed else (_rows(a), _rows(grad))
    if _by_torch(a, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.mT, right, offs=offsets)
    if _by_kernel(left):
        from packgraph.ops.grouped_gemm.add_kernel import add_products

        total = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
        add_products(total, left, right, offsets)
        return total
    return torch.stack(
        [
            torch.where(inside, left, 0).mT @ torch.where(inside, right, 0)
            for inside in _inside(offsets, a.shape[0])
        ]
    )


def add_matrices_gradient(
    total: Tensor, grad: Tensor, a: Tensor, offsets: Tensor, transposed: bool
) -> None:
    """total += matrices_gradient(grad, a, offsets, transposed), in one pass over `total` on CUDA.

    There the sum is rounded once, elsewhere (and in ways that let the cache add, see
    ops/grouped_gemm/configs.py) the product first, to the dtype of `total`: that may be float32
    where rows are narrower. With few rows per expert a gradient costs what its memory does, and
    written, read and added it goes through twice as much.
    """
    if total.is_contiguous() and _by_kernel(total):
        from packgraph.ops.grouped_gemm.add_kernel import add_products

        add_products(total, *((grad, a) if transposed else (a, grad)), offsets)
    else:
        grad, a = grad.to(total.dtype), a.to(total.dtype)
        total.add_(matrices_gradient(grad, a, offsets, transposed))


def _rows(x: Tensor) -> Tensor:
    """x, in rows that a kernel can read."""
    if not x.numel():
        return x.new_empty(x.shape)  # its strides may be 0
    stride = x.stride(0)
    fits = x.stride(1) == 1 and stride >= x.shape[1] and stride * x.element_size() % ALIGNMENT == 0
    return aligned(x if fits else x.contiguous())


def _matrices(matrices: Tensor, transposed: bool) -> Tensor:
    """[E, K, N]."""
    matrices = aligned(matrices.contiguous())
    return matrices.mT if transposed else matrices


def _inside(offsets: Tensor, rows: int) -> list[Tensor]:
    """Per expert which rows are its own, bool [R, 1]."""
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)[:, None]
    before = row.new_zeros(())
    inside = []
    for end in offsets.unbind(0):
        inside.append((row >= before) & (row < end))
        before = end
    return inside


def grouped_problems(device: torch.device, dtype: torch.dtype, *widths: int) -> list[str]:
    """Every reason why torch's grouped product cannot serve rows of these widths without a host
    sync; none if it can."""
    reasons = []
    if device.type == "cuda" and dtype != torch.bfloat16:
        reasons.append(f"the dtype is {dtype}, not bfloat16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < HOPPER:
        reasons.append("the device has a compute capability below 9.0")
    if device.type != "cuda" and dtype not in DTYPES:
        reasons.append(f"the dtype is {dtype}, not float32, bfloat16 or float16")
    reasons += [
        f"rows of {width} numbers do not fill {ALIGNMENT} bytes"
        for width in widths
        if width * dtype.itemsize % ALIGNMENT
    ]
    return reasons


def _by_torch(x: Tensor, *widths: int) -> bool:
    """Returns whether torch's grouped product can be taken."""
    return not grouped_problems(x.device, x.dtype, *widths)


def _by_kernel(x: Tensor) -> bool:
    """Returns whether Triton's kernels can be taken; else products are masked. Raises ValueError
    where that would surprise."""
    if not x.is_cuda or x.dtype not in DTYPES:
        return False
    if not HAS_TRITON:
        raise ValueError(
            f"grouped_mm needs Triton for {x.dtype} on {x.device} (torch alone: bfloat16 on "
            "compute "
            "capability 9.0 or more, rows that fill 16 bytes), which is not installed: pip install "
            "triton"
        )
    return True
