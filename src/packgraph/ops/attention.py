"""Causal attention within packed documents: one signature, several backends.

    documents   |--- A ---|-- B --|- C -|..padding..|   a row sees the earlier rows of its own document only

A backend is a function (q, k, v, meta, scale) -> out in a file of its own; BACKENDS names them. `naive` is
the specification and reads boundaries on the host; the others can be captured. All give exact zeros in
padding, in the output and in the gradients, whatever the padding rows of q, k and v held.
"""
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from packgraph.ops.attention_metadata import AttentionMetadata, attention_metadata
from packgraph.ops.attention_naive import naive_attention
from packgraph.ops.attention_sdpa import sdpa_attention
from packgraph.ops.attention_varlen import varlen_attention

__all__ = ["BACKENDS", "AttentionMetadata", "attention", "attention_metadata", "choose_backend"]

Backend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float | None], Tensor]
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"naive": naive_attention, "sdpa": sdpa_attention, "varlen": varlen_attention}
)


def choose_backend(device: torch.device, dtype: torch.dtype) -> str:
    """Name of the fastest backend for tensors of `dtype` on `device`."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return "varlen"
    return "sdpa"


def attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, *, scale: float | None = None
) -> Tensor:
    """Causal attention within documents by the backend that `meta` was built for.

    q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv]; Hq is a multiple of Hkv, query head h reads key head
    h // (Hq / Hkv). scale: factor on the scores, default D ** -0.5. Returns [T, Hq, Dv], zero in padding.
    Raises ValueError for shapes that do not fit together or that the backend does not support.
    """
    num_tokens = meta.padding_mask.shape[0]
    if not (
        q.dim() == k.dim() == v.dim() == 3
        and q.shape[0] == k.shape[0] == v.shape[0] == num_tokens
        and q.shape[2] == k.shape[2]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}. Each "
            f"is [T, heads, head_dim] with T = {num_tokens} as in the batch; q and k share head_dim, k and v "
            "share heads, and q's heads are a multiple of k's."
        )
    return BACKENDS[meta.backend](q, k, v, meta, scale)
