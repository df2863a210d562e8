"""Several linear layers of the same input as one matrix product, their weights staying parameters
of their own.

    memory    | v_proj | k_proj | q_proj |      one behind another, as a model lays them and flat
                                                buffers keep them
    product   x [T, H]  x  [V + K + Q, H]^T  =  [T, V + K + Q]  ->  v | k | q, views

A few large products fill a GPU better than many small ones: forward, gradient of the input and
gradients of the weights are one product each instead of three. Names, checkpoints and optimizers
know nothing of it. Whether the weights lie side by side is looked up inside the operation, so that
code which torch.compile shares between layers does not depend on it; where they do not, the
products are formed one by one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def merged_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x @ weight.T for every weight: tensors [T, O_i], views of one [T, sum of O_i].

    x: [T, H]; weights: [O_i, H] each, of x's dtype, in the order in which they lie in memory.
    """
    return _forward(x, list(weights)).split([weight.shape[0] for weight in weights], dim=1)


def naive_merged_linear(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The specification: one product after the other."""
    return tuple(F.linear(x, weight) for weight in weights)


def one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """[sum of O_i, H], a view, if the contiguous matrices `weights` lie one behind another in one
    storage."""
    first, place = weights[0], weights[0].storage_offset()
    for weight in weights:
        if (
            weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or not weight.is_contiguous()
            or weight.storage_offset() != place
        ):
            return None
        place += weight.numel()
    return first.as_strided(
        (sum(weight.shape[0] for weight in weights), first.shape[1]), (first.shape[1], 1)
    )


@torch.no_grad()
def lay_side_by_side(weights: Sequence[Tensor]) -> None:
    """Move the matrices `weights` into one storage, in this order, unless they lie so already."""
    if (
        any(weight.is_meta for weight in weights)
        or one_matrix([weight.detach() for weight in weights]) is not None
    ):
        return
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(
        weights, whole.split([weight.shape[0] for weight in weights]), strict=True
    ):
        weight.data = part


@torch.library.custom_op("packgraph::merged_linear", mutates_args=())
def _forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    """[T, sum of O_i]."""
    whole = one_matrix(weights)
    if whole is None:
        return torch.cat(naive_merged_linear(x, weights), dim=1)
    return x @ whole.t()


@_forward.register_fake
def _forward_shapes(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("packgraph::merged_linear_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of x, [T, H], and of all weights, [sum of O_i, H]."""
    whole = one_matrix(weights)
    if whole is None:
        whole = torch.cat(weights)
    return grad @ whole, grad.t() @ x


@_backward.register_fake
def _backward_shapes(grad: Tensor, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    of_x, of_weights = _backward(grad, x, weights)
    return of_x, list(of_weights.split([weight.shape[0] for weight in weights]))


_forward.register_autograd(_differentiate, setup_context=_save)
