"""Rows of an embedding, and the gradient of its matrix by the rows that were looked up.

    forward     words [T] ── rows of the matrix [V, H] ──▶ [T, H]
    backward    gradient [T, H] ── summed by word ──▶ those rows of the matrix's gradient

The gradient of a lookup is a matrix as large as the vocabulary of which T rows at most are not
zero. Compiled code adds these rows to the weight's `.grad` (`add_embedding_gradient`, which
graphs/compiled/products.py puts in place of `embedding_gradient`) and never makes the matrix. On
CUDA rows are sorted by word and summed in float32 in the order of the row by a kernel of Triton:
nothing is atomic, so sums repeat bitwise.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.triton_found import HAS_TRITON

NO_WORD = -1
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of sums in float32


def embedding(words: Tensor, weight: Tensor) -> Tensor:
    """Rows [T, H] of `weight` [V, H] for `words`, int64 [T].

    A row of `NO_WORD` is some row of the matrix and has no gradient. All other words must be in
    [0, V). Differentiable in `weight`.
    """
    return _Rows.apply(words, weight)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(words, weight)
        return F.embedding(words.clamp(min=0), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        words, weight = ctx.saved_tensors
        return None, embedding_gradient(grad, words, weight)


@torch.library.custom_op("packgraph::embedding_gradient", mutates_args=())
def embedding_gradient(grad: Tensor, words: Tensor, weight: Tensor) -> Tensor:
    """Gradient [V, H] of `weight` from grad [T, H] of its dtype."""
    if not _has_kernel(grad):
        return naive_embedding_gradient(grad, words, weight)
    total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    _add(total, grad, words)
    return total


@torch.library.custom_op("packgraph::add_embedding_gradient", mutates_args=("total",))
def add_embedding_gradient(total: Tensor, grad: Tensor, words: Tensor, weight: Tensor) -> None:
    """total [V, H], contiguous, += `embedding_gradient(grad, words, weight)`: the same bits but for
    the sign of zeros. Only rows that were looked up are read and written."""
    if _has_kernel(grad):
        _add(total, grad, words)
    else:
        total.add_(naive_embedding_gradient(grad, words, weight))


def naive_embedding_gradient(grad: Tensor, words: Tensor, weight: Tensor) -> Tensor:
    """The specification: sums in float32, rounded once. torch's own, which repeats bitwise on CUDA,
    too."""
    counted = grad.masked_fill((words == NO_WORD)[:, None], 0.0)
    wide = counted.to(torch.promote_types(grad.dtype, torch.float32))
    sums = torch.ops.aten.embedding_dense_backward(
        wide, words.clamp(min=0), weight.shape[0], NO_WORD, False
    )
    return sums.to(weight.dtype)


def _has_kernel(grad: Tensor) -> bool:
    return HAS_TRITON and grad.is_cuda and grad.dtype in DTYPES


def _add(total: Tensor, grad: Tensor, words: Tensor) -> None:
    from packgraph.ops.embedding_kernel import add_rows

    ordered, rows = torch.sort(words, stable=True)
    # Compiled code chooses strides by itself for what an operation reads that was put in later.
    add_rows(total, grad.contiguous(), ordered, rows)


@embedding_gradient.register_fake
def _gradient_shape(grad: Tensor, words: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@add_embedding_gradient.register_fake
def _adding_shape(total: Tensor, grad: Tensor, words: Tensor, weight: Tensor) -> None:
    return None
