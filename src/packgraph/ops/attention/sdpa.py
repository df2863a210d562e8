"""Attention by a [T, T] mask through torch's SDPA: every device, every dtype, O(T^2) memory.

Padding counts as one more document here, so that softmax is defined in its rows; what comes out
there is set to zero. Queries, keys and values of padding are set to zero first: a masked
probability of 0 times NaN would still be NaN.
"""

import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.attention.metadata import AttentionMetadata


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, scale: float | None
) -> Tensor:
    """Attention by mask. Shapes and dtypes as in `packgraph.ops.attention.api.attention`."""
    padding, tail = meta.padding_mask[:, None, None], meta.key_tail[:, None, None]
    q, k, v = (
        x.masked_fill(mask, 0.0).transpose(0, 1).unsqueeze(0)
        for x, mask in ((q, padding), (k, tail), (v, tail))
    )
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=meta.mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1).masked_fill(padding, 0.0)
