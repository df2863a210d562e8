"""Attention document by document, by the textbook formula: the specification of the other backends.

Reads the boundaries on the host, so it serves as an oracle and can never be captured.
"""

import itertools
import math

import torch
from torch import Tensor

from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.ops.attention.options import PLAIN, ScoreOptions


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    scale: float | None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Softmax(q k^T * scale) v for each document alone; zeros in padding. Shapes as in
    `attention`. Raises ValueError for dropout, which has no textbook numbers."""
    if options.dropout:
        raise ValueError("attention backend 'naive' has no dropout; use 'sdpa'")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    boundaries = meta.cu_seqlens.tolist()
    outputs = []
    for queries, keys in zip(
        itertools.pairwise(boundaries), itertools.pairwise(meta.cu_keys.tolist()), strict=True
    ):
        parts = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        outputs.append(_one_document(*parts, scale, options))
    outputs.append(q.new_zeros(q.shape[0] - boundaries[-1], q.shape[1], v.shape[2]))
    return torch.cat(outputs)


def _one_document(q: Tensor, k: Tensor, v: Tensor, scale: float, options: ScoreOptions) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    ahead = k.shape[0] - q.shape[0]
    everything = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    hidden = everything.triu(1 + ahead)
    if options.window is not None:
        hidden = hidden | everything.tril(ahead - options.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, v)
