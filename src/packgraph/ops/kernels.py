"""Triton, and the form in which kernels want tensors: for modules that hold a kernel beside its
operation.

    from packgraph.ops.kernels import has_kernel, tl, triton

Triton comes with torch for CUDA. Where it is not installed, such modules are imported all the same:
decorators and annotations of kernels evaluate to nothing, and a launch raises ModuleNotFoundError.
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "HAS_TRITON",
    "aligned",
    "by_rows",
    "has_kernel",
    "kernel_problems",
    "save_constants",
    "save_inputs",
    "tl",
    "triton",
]
HAS_TRITON = importlib.util.find_spec("triton") is not None
FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # that most kernels take
ALIGNMENT = 16  # bytes, of what a descriptor begins with and of its strides


class _Absent:
    """Stand-in for Triton, its language, and every kernel."""

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):  # which tools ask any object for
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Absent":
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise ModuleNotFoundError("this kernel needs Triton, which is not installed", name="triton")


if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = _Absent()


def has_kernel(x: Tensor) -> bool:
    """Returns whether kernels take `x`: on CUDA, one of `FLOATS`, with Triton installed."""
    return HAS_TRITON and x.is_cuda and x.dtype in FLOATS


def kernel_problems(
    device: torch.device, dtype: torch.dtype, others: Mapping[str, bool]
) -> list[str]:
    """Returns reasons why kernels cannot take tensors like these. others: further reasons, and
    whether they hold."""
    reasons = {
        "Triton is not installed": not HAS_TRITON,
        f"the kernels run on CUDA, not on {device.type}": device.type != "cuda",
        f"the kernels take float32, bfloat16 and float16, not {dtype}": dtype not in FLOATS,
        **others,
    }
    return [reason for reason, holds in reasons.items() if holds]


def by_rows(x: Tensor) -> Tensor:
    """x [R, C], or a copy, with the numbers of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """x, or a copy that begins where kernels like it. So which kernel makes a product follows from
    shapes and strides and never from where a tensor lies: eager calls and replays, which have
    copies of their own, choose alike."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def save_constants(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps all but the first input of an operation, whose backward reads no tensor, as
    `ctx.constants`."""
    ctx.constants = inputs[1:]


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the inputs of an operation for its backward: tensors, and None for those that were not
    given, as `ctx.saved_tensors`; all others as `ctx.constants`."""
    tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
    ctx.constants = inputs[len(tensors) :]
    ctx.save_for_backward(*tensors)
