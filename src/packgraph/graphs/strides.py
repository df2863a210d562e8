"""Memory layouts of static copies: a copy has the strides of its original where these fill memory without gaps."""
import itertools

import torch


def contiguous_strides(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`."""
    sizes = [max(1, size) for size in reversed(shape)]
    return tuple(reversed(list(itertools.accumulate([1, *sizes[:-1]], lambda a, b: a * b)))) if shape else ()


def own_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides a static copy of `tensor` must have, or None for row-major.

    Transposed and channels-last tensors keep their layout, since kernels choose by it; expanded and sliced tensors
    are copied row-major.
    """
    if tensor.is_contiguous():
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())
