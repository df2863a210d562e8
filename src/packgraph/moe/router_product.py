"""Logits of the router in float32 by tensor cores, without rounding what goes in.

    forward     x [T, H] @ weight [E, H]^T -> float32 [T, E]       two bfloat16 multiply exactly in
                                                                   float32
    backward    gradient [T, E], float32, cut -> high | middle | low, bfloat16 [T, 3E]; high + middle + low is exact
                of x       [T, 3E] @ [3E, H], the weight three times, one below the other
                of weight  [3E, T] @ [T, H] -> float32 [3E, H], the three parts added up, rounded
                           once

Rounded logits would make ties, and choices that differ between layouts; so these products are in
float32. On CUDA that means kernels without tensor cores, several times slower than the same
products of bfloat16. But where x and weight are bfloat16 anyway, bfloat16 products that are added
up in float32 are the float32 product, up to the order of additions (and to how tensor cores add:
they cut off last bits instead of rounding). Only the gradient that comes in is of more bits: 24,
which three bfloat16 of 8 bits each hold. (Henry, Tang and Heinecke 2019, arXiv:1904.06376, cut
matrices so.)

Nothing waits for the host, shapes are static, and a row of the logits and of the gradient of x
depends on its own row alone. The gradient of weight has a sibling that adds it to memory, for
graphs/compiled/products.py.
"""  # noqa: E501

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.kernels import save_inputs
from packgraph.ops.linear import as_given

PARTS = 3
UPPER_HALF = -(2**16)  # of 32 bits: what a float32 shares with a bfloat16


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32: [T, E]. Differentiable in both; gradients have the dtypes of x and
    weight.

    x: [T, H]; weight: [E, H]. Both bfloat16: by products of bfloat16, as precise; anything else: as
    the naive one.
    """
    exact = x.dtype == weight.dtype == torch.bfloat16
    return _product(x, weight) if exact else naive_router_logits(x, weight)


def naive_router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """The specification: everything converted to float32 first."""
    return F.linear(x.float(), weight.float())


def exact_parts(values: Tensor) -> Tensor:
    """float32 [T, E] as sums of three bfloat16: [T, 3E], high | middle | low.

    Each part has the 8 leading bits of what the parts before have left. They are cut off, not
    rounded: nothing can overflow, and a compiler that keeps bfloat16 in float32 between operations
    (Inductor does) changes nothing. The sum is exact from 2^-110 in size on. Below, bits under
    2^-133, the smallest bfloat16, are rounded: an error of 2^-134 at most. Infinity becomes a NaN,
    as NaN does.
    """
    high = _leading_bits(values)
    rest = values - high  # exact: bits of `values`
    middle = _leading_bits(rest)
    return torch.cat([high, middle, rest - middle], dim=1).bfloat16()


def _leading_bits(values: Tensor) -> Tensor:
    """float32, cut to what bfloat16 holds."""
    return (values.view(torch.int32) & UPPER_HALF).view(torch.float32)


def _in_float32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, of bfloat16, added up in float32 and left so. torch has this for CUDA alone."""
    with as_given(left):
        return (
            torch.mm(left, right, out_dtype=torch.float32)
            if left.is_cuda
            else left.float() @ right.float()
        )


@torch.library.custom_op("packgraph::router_logits", mutates_args=())
def _product(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, E] from bfloat16 [T, H] and [E, H]."""
    return _in_float32(x, weight.t())


@torch.library.custom_op("packgraph::router_gradient_of_rows", mutates_args=())
def _gradient_of_rows(parts: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 [T, H] from parts, bfloat16 [T, 3E], and weight [E, H].

    Added up in float32 and rounded once, unless cuBLAS splits the sums of 3E (at most for few rows)
    while `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is on: then as every
    product of bfloat16.
    """
    stacked = weight.repeat(PARTS, 1)
    with as_given(parts):
        return parts @ stacked if parts.is_cuda else _in_float32(parts, stacked).to(parts.dtype)


@torch.library.custom_op("packgraph::router_gradient_of_weight", mutates_args=())
def gradient_of_weight(parts: Tensor, x: Tensor) -> Tensor:
    """bfloat16 [E, H] from parts, bfloat16 [T, 3E], and x [T, H]."""
    return _summed_parts(parts, x).to(x.dtype)


@torch.library.custom_op("packgraph::add_router_gradient_of_weight", mutates_args=("total",))
def add_gradient_of_weight(total: Tensor, parts: Tensor, x: Tensor) -> None:
    """total [E, H] += gradient_of_weight(parts, x), rounded once, as a sum (the name:
    graphs/compiled/products.py)."""
    total.add_(_summed_parts(parts, x))


def _summed_parts(parts: Tensor, x: Tensor) -> Tensor:
    """float32 [E, H]."""
    return _in_float32(parts.t(), x).unflatten(0, (PARTS, -1)).sum(0)


_product.register_fake(
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
)


_gradient_of_rows.register_fake(
    lambda parts, weight: parts.new_empty(parts.shape[0], weight.shape[1])
)


gradient_of_weight.register_fake(lambda parts, x: x.new_empty(parts.shape[1] // PARTS, x.shape[1]))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    parts = exact_parts(grad)
    return (
        _gradient_of_rows(parts, weight) if ctx.needs_input_grad[0] else None,
        gradient_of_weight(parts, x) if ctx.needs_input_grad[1] else None,
    )


_product.register_autograd(_differentiate, setup_context=save_inputs)
