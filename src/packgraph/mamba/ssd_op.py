"""The kernels of mamba/ssd.py as two operations, forward and backward, with shapes known
beforehand.

torch.compile, the recorder and whoever watches operations see these two and nothing of the kernels.
The forward keeps its inputs and nothing else.
"""

from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def ssd_by_kernels(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Tensor:
    """As `ssd` in mamba/ssd.py, for what `ssd_problems` has no objection to."""
    return _ssd(x, dt, a, b, c, d, document_ids, chunk)


@torch.library.custom_op("packgraph::ssd", mutates_args=())
def _ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Tensor:
    """y [T, H, P]."""
    from packgraph.mamba.ssd_forward_kernel import forward

    return forward(
        side_by_side(x),
        _columns_dense(dt),
        a.contiguous(),
        side_by_side(b),
        side_by_side(c),
        None if d is None else d.contiguous(),
        document_ids.contiguous(),
        chunk,
    )


@torch.library.custom_op("packgraph::ssd_backward", mutates_args=())
def _ssd_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Gradients:
    """Gradients of x, dt, a, b, c and d (one element if there is none)."""
    from packgraph.mamba.ssd_backward_kernel import backward

    dx, ddt, da, db, dc, dd = backward(
        side_by_side(grad),
        side_by_side(x),
        _columns_dense(dt),
        a.contiguous(),
        side_by_side(b),
        side_by_side(c),
        None if d is None else d.contiguous(),
        document_ids.contiguous(),
        chunk,
    )
    return dx, ddt, da, db, dc, a.new_empty(1) if dd is None else dd


@_ssd.register_fake
def _shape(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Tensor:
    return x.new_empty(x.shape)


@_ssd_backward.register_fake
def _shapes(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Gradients:
    x, dt, a, b, c = (value.new_empty(value.shape) for value in (x, dt, a, b, c))
    return x, dt, a, b, c, a.new_empty(1) if d is None else d.new_empty(d.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, of_skip = _ssd_backward(grad, *ctx.saved_tensors, ctx.chunk)
    return (*gradients, None if ctx.saved_tensors[5] is None else of_skip, None, None)


_ssd.register_autograd(_differentiate, setup_context=_save)


def side_by_side(value: Tensor) -> Tensor:
    """[T, A, B] as it is if the A B columns of a row lie side by side, rows anywhere; otherwise a
    copy."""
    return value if value.stride()[1:] == (value.shape[2], 1) else value.contiguous()


def _columns_dense(value: Tensor) -> Tensor:
    return value if value.stride(1) == 1 else value.contiguous()
