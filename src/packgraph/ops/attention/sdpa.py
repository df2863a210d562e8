"""Attention by a [T, T] mask through torch's SDPA: every device, every dtype, O(T^2) memory.

Padding counts as one more document here, so that softmax is defined in its rows; what comes out
there is set to zero. Queries, keys and values of padding are set to zero first: a masked
probability of 0 times NaN would still be NaN.

Soft caps and sinks, which SDPA does not know, go by single operations with all scores in memory:
[Hq, T, T], in float32 where they are narrower.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.ops.attention.options import PLAIN, ScoreOptions


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    scale: float | None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Attention by mask. Shapes and dtypes as in `packgraph.ops.attention.api.attention`."""
    padding, tail = meta.padding_mask[:, None, None], meta.key_tail[:, None, None]
    q, k, v = (
        x.masked_fill(mask, 0.0).transpose(0, 1) for x, mask in ((q, padding), (k, tail), (v, tail))
    )
    mask = meta.mask
    assert mask is not None
    if options.window is not None:
        mask = mask & in_window(mask.shape[0], options.window, mask.device)
    if options.softcap or options.sinks is not None:
        out = _by_operations(q, k, v, mask, scale, options)
    else:
        out = F.scaled_dot_product_attention(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            dropout_p=options.dropout,
            scale=scale,
            enable_gqa=q.shape[0] != k.shape[0],
        ).squeeze(0)
    return out.transpose(0, 1).masked_fill(padding, 0.0)


def in_window(tokens: int, window: int, device: torch.device) -> Tensor:
    """bool [T, T]: whether a column is less than `window` before a row."""
    index = torch.arange(tokens, device=device)
    return index[:, None] - index[None, :] < window


def _by_operations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    options: ScoreOptions,
) -> Tensor:
    """q: [Hq, T, D]; k, v: [Hkv, T, D]; mask: bool [T, T]. Returns [Hq, T, Dv]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    probabilities = probabilities.to(q.dtype)
    if options.dropout:
        probabilities = F.dropout(probabilities, options.dropout)
    return probabilities @ v
