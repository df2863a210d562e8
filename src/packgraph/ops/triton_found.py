"""Triton, for modules that hold a kernel beside the operation that it serves.

    from packgraph.ops.triton_found import HAS_TRITON, tl, triton

Triton comes with torch for CUDA. Where it is not installed, such modules are imported all the same:
decorators and annotations of kernels evaluate to nothing, and a launch raises ModuleNotFoundError.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

__all__ = ["HAS_TRITON", "tl", "triton"]
HAS_TRITON = importlib.util.find_spec("triton") is not None


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
