"""Attention kernels by the textbook formula, with the trap of the real ones: rows of padding are
left unwritten.

Without autograd, since custom operations run below it; independent of the backends that are tested
with it.
"""

import itertools

import torch
from torch import Tensor

NAN = float("nan")


def textbook_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    cu_keys: Tensor | None = None,
    left: int = -1,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, Dv] and log-sum-exp [Hq, T], NaN in padding. cu_keys: boundaries of keys, default
    those of queries; documents are then aligned at their ends. left: how far a token sees back; -1
    = to the beginning of its document."""
    group = q.shape[1] // k.shape[1]
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), NAN, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), NAN)
    for rows, keys in _documents(cu_seqlens, cu_keys):
        scores = _scores(q[rows], k[keys], scale, left)
        lse[:, rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(group, 1))
    return out, lse


def textbook_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    cu_keys: Tensor | None = None,
    left: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, NaN in padding. As kernels do it: probabilities come from lse, and the row sums
    of gradients from out."""
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.full_like(x, NAN) for x in (q, k, v))
    for rows, keys in _documents(cu_seqlens, cu_keys):
        weights = (_scores(q[rows], k[keys], scale, left) - lse[:, rows, None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad[rows], v[keys].repeat_interleave(group, 1))
        sums = (grad[rows] * out[rows]).sum(-1).t()[:, :, None]
        of_scores = weights * (of_weights - sums) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", of_scores, k[keys].repeat_interleave(group, 1))
        wide = (
            torch.einsum("hqk,qhd->khd", of_scores, q[rows]),
            torch.einsum("hqk,qhd->khd", weights, grad[rows]),
        )
        dk[keys], dv[keys] = (x.unflatten(1, (-1, group)).sum(2) for x in wide)
    return dq, dk, dv


def _documents(cu_seqlens: Tensor, cu_keys: Tensor | None) -> list[tuple[slice, slice]]:
    queries, keys = (
        [slice(*pair) for pair in itertools.pairwise(boundaries.tolist())]
        for boundaries in (cu_seqlens, cu_seqlens if cu_keys is None else cu_keys)
    )
    return list(zip(queries, keys, strict=True))


def _scores(q: Tensor, k: Tensor, scale: float, left: int) -> Tensor:
    scores = (
        torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    )
    ahead = k.shape[0] - q.shape[0]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + ahead)
    if left >= 0:
        hidden |= torch.ones_like(scores, dtype=torch.bool).tril(ahead - left - 1)
    return scores.masked_fill(hidden, float("-inf"))


def random_inputs(
    rows: int, kv_heads: int, group: int, dim: int, value_dim: int, seed: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (rows, kv_heads * group, dim),
        (rows, kv_heads, dim),
        (rows, kv_heads, value_dim),
        (rows, kv_heads * group, value_dim),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]
