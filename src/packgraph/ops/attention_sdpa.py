"""Attention by a [T, T] mask through torch's SDPA: every device, every dtype, O(T^2) memory.

Padding counts as one more document here, so that softmax is defined in its rows; what comes out there is set
to zero. Queries, keys and values of padding are set to zero first: a masked probability of 0 times NaN would
still be NaN.
"""
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from packgraph.ops.attention_metadata import AttentionMetadata


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal-within-document mask, bool [T, T], from int [T] document ids (padding has an id of its own)."""
    index = torch.arange(document_ids.shape[0], device=document_ids.device)
    same_document = document_ids[:, None] == document_ids[None, :]
    return same_document & (index[:, None] >= index[None, :])


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, meta: "AttentionMetadata", scale: float | None) -> Tensor:
    """Attention by mask. Shapes and dtypes as in `packgraph.ops.attention.attention`."""
    padding = meta.padding_mask[:, None, None]
    q, k, v = (x.masked_fill(padding, 0.0).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=meta.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1).masked_fill(padding, 0.0)
