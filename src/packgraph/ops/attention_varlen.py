"""Attention by torch's varlen kernel (FlashAttention): cost follows the documents, not the capacity.

    rows  0 .. cu_seqlens[-1]      the documents: computed
          cu_seqlens[-1] .. T      padding: the kernel leaves these rows of out, dq, dk and dv UNWRITTEN

The unwritten rows may hold anything, NaN included, and NaN times a zero gradient is NaN in every weight
gradient. So they are set to zero: in the output by masked_fill, in the gradients by a function that is the
identity forwards.
"""
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from packgraph.ops.attention_metadata import AttentionMetadata

CAUSAL = (-1, 0)  # a tuple: the kernel's wrapper compares with `== (-1, 0)` and a list would lose causality
MAX_HEAD_DIM = 256
# torch 2.11 accepts fewer key heads than query heads silently; from 2.12 on it must be said
_SAYS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class _ZeroPaddingGradient(torch.autograd.Function):
    """Identity whose gradient is zero in the rows of padding, whatever came in there."""

    @staticmethod
    def forward(ctx: Any, padding: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(padding)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (padding,) = ctx.saved_tensors
        return (None, *(grad.masked_fill(padding, 0.0) for grad in grads))


def zero_padding_gradient(padding_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `tensors` ([T, H, D] each); their gradients become zero where `padding_mask` (bool [T])."""
    return _ZeroPaddingGradient.apply(padding_mask[:, None, None], *tensors)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, scale: float | None
) -> Tensor:
    """Attention by varlen_attn. Shapes as in `attention`; CUDA, bfloat16 or float16."""
    _check_supported(q, v)
    q, k, v = zero_padding_gradient(meta.padding_mask, q, k, v)
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # the kernel knows one head size; zero columns come out as zero columns
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    gqa: dict[str, Any] = {"enable_gqa": True} if _SAYS_GQA and q.shape[1] != k.shape[1] else {}
    bounds = (meta.cu_seqlens, meta.cu_seqlens, meta.longest, meta.longest)
    out = varlen_attn(q, k, v, *bounds, scale=scale, window_size=CAUSAL, **gqa)
    assert isinstance(out, Tensor)  # a tuple only when auxiliary outputs are asked for
    return out[..., :value_dim].masked_fill(meta.padding_mask[:, None, None], 0.0)


def _check_supported(q: Tensor, v: Tensor) -> None:
    reasons = []
    if q.device.type != "cuda":
        reasons.append(f"the tensors are on {q.device}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"the dtype is {q.dtype}, not bfloat16 or float16")
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"head_dim is {q.shape[-1]}, not a multiple of 8 up to {MAX_HEAD_DIM}")
    if v.shape[-1] > q.shape[-1]:
        reasons.append(f"values ({v.shape[-1]}) are wider than queries ({q.shape[-1]})")
    if reasons:
        text = "; ".join(reasons)
        raise ValueError(f"attention backend 'varlen' cannot run: {text}. Use attention_backend='sdpa'.")
