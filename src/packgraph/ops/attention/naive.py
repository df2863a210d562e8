"""Attention document by document, by the textbook formula: the specification of the other backends.

Reads the boundaries on the host, so it serves as an oracle and can never be captured.
"""

import itertools
import math

import torch
from torch import Tensor

from packgraph.ops.attention.metadata import AttentionMetadata


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, scale: float | None
) -> Tensor:
    """Softmax(q k^T * scale) v for each document alone; zeros in padding. Shapes as in
    `attention`."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    boundaries = meta.cu_seqlens.tolist()
    outputs = []
    for queries, keys in zip(
        itertools.pairwise(boundaries), itertools.pairwise(meta.cu_keys.tolist()), strict=True
    ):
        outputs.append(_one_document(q[slice(*queries)], k[slice(*keys)], v[slice(*keys)], scale))
    outputs.append(q.new_zeros(q.shape[0] - boundaries[-1], q.shape[1], v.shape[2]))
    return torch.cat(outputs)


def _one_document(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(
        1 + k.shape[0] - q.shape[0]
    )
    probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v)
