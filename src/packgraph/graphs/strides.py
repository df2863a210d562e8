"""Memory layouts of static copies: a copy has the strides of its original where these fill memory
without gaps."""

import itertools

import torch

Layout = tuple[int, ...]  # strides of a tensor, () for row-major


def contiguous_strides(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`."""
    sizes = [max(1, size) for size in reversed(shape)]
    return (
        tuple(reversed(list(itertools.accumulate([1, *sizes[:-1]], lambda a, b: a * b))))
        if shape
        else ()
    )


def own_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides a static copy of `tensor` must have, or None for row-major.

    Transposed and channels-last tensors keep their layout, since kernels choose by it; expanded and
    sliced tensors are copied row-major.
    """
    return (
        None
        if tensor.is_contiguous() or not _is_dense(tensor.stride(), tensor.shape)
        else tuple(tensor.stride())
    )


def layout_of(gradient: torch.Tensor) -> Layout:
    """The layout in which a static copy of `gradient` is read: its own, expanded dimensions
    included; row-major for tensors with gaps."""
    if gradient.is_contiguous():
        return ()
    return tuple(gradient.stride()) if _is_dense(gradient.stride(), _unexpanded(gradient)) else ()


def with_bits(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """The same memory with the conjugate and negative bits of lazy views (`torch.conj`, `.imag` of
    it)."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, which may be expanded: every element of its memory is written
    once."""
    shape = _unexpanded(target)
    if shape == tuple(target.shape):
        target.copy_(source)
    else:
        source = source[tuple(slice(0, size) for size in shape)]
        target.as_strided(shape, target.stride()).copy_(source)


def _unexpanded(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of what lies in memory: expanded dimensions count once."""
    return tuple(
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_dense(strides: tuple[int, ...], shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a tensor fills its memory without gaps and overlaps, in whatever order of
    dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
