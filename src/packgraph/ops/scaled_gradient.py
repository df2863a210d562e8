"""A gradient that was made in the forward, times the factor that the backward brings.

The loss of a linear head makes the gradient of its matrix while the logits are there, and learns
only in the backward what to multiply it by. Compiled code multiplies and adds to the weight's
`.grad` at once (`add_scaled_gradient`, which graphs/compiled/products.py puts in place of
`scaled_gradient`): three numbers of an element are moved where two operations move five.
"""

import torch
from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON

# Of gradients that the kernel adds: float32 ones go by two operations.
DTYPES = (torch.bfloat16, torch.float16)


def scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """`gradient` (any float dtype) times `factor` (float32 []), rounded once, to the gradient's
    dtype."""
    return None if gradient is None else _scaled(gradient, factor)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    # One dimension, not none: then the product is formed in float32. A 0-d factor would be rounded
    # to bfloat16 first, which puts the same error into every gradient.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient))


@torch.library.custom_op("packgraph::scaled_gradient", mutates_args=())
def scaled_gradient(gradient: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """`scaled(gradient, factor)`, which is the gradient of `weight`."""
    return _scaled(gradient, factor)


@torch.library.custom_op("packgraph::add_scaled_gradient", mutates_args=("total",))
def add_scaled_gradient(total: Tensor, gradient: Tensor, factor: Tensor, weight: Tensor) -> None:
    """total += `scaled_gradient(gradient, factor, weight)`: the same bits where total has their
    dtype. Where it is float32, the product is not rounded to a narrower one."""
    whole = total.is_contiguous() and gradient.is_contiguous()
    if HAS_TRITON and whole and total.is_cuda and gradient.dtype in DTYPES:
        from packgraph.ops.scaled_gradient_kernel import add_scaled

        add_scaled(total, gradient, factor)
    else:
        total.add_(_scaled(gradient.to(total.dtype), factor))


@scaled_gradient.register_fake
def _scaled_shape(gradient: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(gradient)


@add_scaled_gradient.register_fake
def _adding_shape(total: Tensor, gradient: Tensor, factor: Tensor, weight: Tensor) -> None:
    return None
