"""Causal attention within packed documents: one signature, several backends.

    documents   |--- A ---|-- B --|- C -|..padding..|   a row sees the earlier rows of its own
    document only

A backend is a function (q, k, v, meta, scale, options) -> out; BACKENDS names them.
`naive` is the specification and reads boundaries on the host; the others can be captured, and
torch.compile sees one graph around each. All give exact zeros in padding, in the output and in the
gradients, whatever the padding rows of q, k and v held.

    flash    flash-attn-4, if it is installed and knows the device and the head sizes   CUDA, bfloat16, float16
    varlen   torch's own kernel                                                         CUDA, bfloat16, float16
    sdpa     torch's SDPA with a [T, T] mask                                            everywhere

Of the options (`ScoreOptions`) flash and varlen know windows and sinks, sdpa all.

`packed_attention` is the same for modules of users, from a PackedBatch.

Where a row is spread over ranks, either heads are exchanged for rows (context.py), or the row is
cut in zigzag (zigzag.py): queries stay, keys and values of all ranks come.

    k, v of own rows --all-gather--> of all rows --reorder--> prefixes --+ q of own rows
    -------------------------------------------------------+-- attention by any backend --> own rows

The backward goes the same way back: gradients of prefixes are added up for each row (two addends at
most), sent to the ranks whose rows they are, and added up there in the order of ranks. All are
gathers and sums in a fixed order, no atomics: same bits in every run, whatever the documents are. A
rank keeps the prefixes for the backward: T + T / 2c rows of keys and values where ulysses keeps T
rows of 1 / c of the heads. Padding inside documents is attended to by padding alone, is zero in the
output, and its gradients are zero.
"""  # noqa: E501

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.attention.context import (
    ContextGroup,
    group_of,
    own_heads_back,
    swap_parts,
    whole_rows,
)
from packgraph.ops.attention.flash import flash_attention, flash_problems
from packgraph.ops.attention.metadata import (
    PLAIN,
    AttentionMetadata,
    ScoreOptions,
    attention_metadata,
)
from packgraph.ops.attention.varlen import varlen_attention, varlen_problems
from packgraph.ops.attention.zigzag import PrefixRows
from packgraph.ops.collectives import all_gather_flat
from packgraph.ops.kernels import save_constants
from packgraph.packing.batch import PackedBatch

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "BackendChoice",
    "ScoreOptions",
    "attention",
    "attention_metadata",
    "choose_backend",
    "packed_attention",
]
Backend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float | None, ScoreOptions], Tensor]


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


BACKENDS: Mapping[str, Backend] = {
    "naive": naive_attention,
    "sdpa": sdpa_attention,
    "varlen": varlen_attention,
    "flash": flash_attention,
}


class BackendChoice(NamedTuple):
    """The backend for a model. name: of BACKENDS. reason: why no faster one was taken; empty when
    it is the fastest."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


# A constant for compiled code: nothing that it looks at changes while a process runs.
@torch.compiler.assume_constant_result
def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    needs: tuple[str, ...] = (),
) -> BackendChoice:
    """The fastest backend that can run q and k [T, heads, head_dim] and v [T, heads, value_dim] of
    `dtype` with the options `needs` (see `ScoreOptions.needs`)."""
    problems = flash_problems(device, dtype, head_dim, value_dim, needs)
    if not problems:
        return BackendChoice("flash", "")
    why = "no flash: " + "; ".join(problems)
    missing = varlen_problems(device, dtype, head_dim, value_dim, needs)
    if not missing:
        return BackendChoice("varlen", why)
    return BackendChoice(
        "sdpa", why if device.type != "cuda" else f"{why}; no varlen: {'; '.join(missing)}"
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float | None = None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Causal attention within documents by the backend that `meta` was built for.

    q: [T, Hq, D]; k: [T, Hkv, D]; v: [T, Hkv, Dv]; Hq is a multiple of Hkv, query head h reads key
    head h // (Hq / Hkv). scale: factor on the scores, default D ** -0.5. Returns [T, Hq, Dv], zero
    in padding. Where the row is spread over ranks (`meta.context`), T is the number of this rank's
    rows in q, k, v and the result; the ranks exchange heads for rows (ops/attention/context.py) or
    gather keys and values (ops/attention/api.py), so the call is collective. options: windows and
    the like, for rows that are not cut in zigzag. Raises ValueError for shapes that do not fit
    together, and for what the backend does not support.
    """
    context = meta.context
    num_tokens = meta.padding_mask.shape[0] // (
        1 if context is None or meta.keys is not None else context.size
    )
    if not (
        q.dim() == k.dim() == v.dim() == 3
        and q.shape[0] == k.shape[0] == v.shape[0] == num_tokens
        and q.shape[2] == k.shape[2]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"attention shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v "
            f"{tuple(v.shape)}. Each "
            f"is [T, heads, head_dim] with T = {num_tokens} as in the batch; q and k share "
            "head_dim, k and v "
            "share heads, and q's heads are a multiple of k's."
        )
    backend = BACKENDS[meta.backend]
    if context is None:
        return backend(q, k, v, meta, scale, options)
    if meta.keys is not None:
        if options.needs:
            raise ValueError(
                f"attention over rows that are cut in zigzag has no {', '.join(options.needs)}; "
                "share heads (ulysses)"
            )
        return zigzag_attention(q, k, v, meta, scale, backend)
    if options.sinks is not None:  # of the heads that are here
        own = options.sinks.chunk(context.size)[context.place]
        options = options._replace(sinks=own)
    return own_heads_back(backend(*whole_rows(q, k, v, context), meta, scale, options), context)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention in which tokens see earlier tokens of their own document only.

    Can be captured: boundaries of documents are read on the device. Padding gives exact zeros, in
    the output and in the gradients, whatever its rows hold.

    Args:
        q: [T, Hq, D], floating point.
        k: [T, Hkv, D], where Hq is a multiple of Hkv; query head h reads key head
            h // (Hq / Hkv).
        v: [T, Hkv, Dv].
        batch: The packed batch that the rows belong to, on their device.
        scale: Factor on the scores. Defaults to D ** -0.5.
        backend: `flash` (flash-attn-4), `varlen` (torch's kernel for CUDA), `sdpa` or `naive`.
            `auto` takes the fastest that supports the device, dtype and sizes.

    Returns:
        [T, Hq, Dv].

    Raises:
        ValueError: If shapes do not fit together, or the backend is unknown or does not support
            them.

    Examples:
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [packgraph.Capacity(8, 2)])
        >>> q = k = v = torch.randn(8, 2, 16)
        >>> out = packgraph.packed_attention(q, k, v, batch)
        >>> torch.equal(out[3], v[3]), out[5:].abs().sum().item()
        (True, 0.0)
    """
    if backend == "auto":
        backend = choose_backend(q.device, q.dtype, q.shape[-1], v.shape[-1]).name
    elif backend not in BACKENDS:
        raise ValueError(
            f"unknown attention backend {backend!r}: use auto or one of {', '.join(BACKENDS)}"
        )
    return attention(q, k, v, attention_metadata(batch, backend), scale=scale)


def zigzag_attention(
    q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata, scale: float | None, backend: Backend
) -> Tensor:
    """Attention of own rows over the whole row: q [R, Hq, D], k [R, Hkv, D], v [R, Hkv, Dv] -> [R,
    Hq, Dv], zero in padding. meta: with `keys`. Collective. Raises ValueError where k and v are of
    two dtypes."""
    assert meta.context is not None and meta.keys is not None
    padding = meta.padding_mask[:, None, None]
    if (
        not meta.finite_padding
    ):  # padding inside documents lies among their rows, where a kernel reads it
        q, k, v = (x.masked_fill(padding, 0.0) for x in (q, k, v))
    out = backend(q, *prefixes(k, v, meta.keys, meta.context), meta, scale, PLAIN)
    return out.masked_fill(padding, 0.0)


def prefixes(
    k: Tensor, v: Tensor, keys: PrefixRows, context: ContextGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values of own rows [R, H, D] and [R, H, Dv] -> of the prefixes [Kx, H, D] and [Kx,
    H, Dv]; in the tail stand those of some row. Collective. Raises ValueError where they are of two
    dtypes."""
    if k.dtype != v.dtype:
        raise ValueError(
            f"keys and values travel together, so they must be of one dtype, not {k.dtype} and "
            f"{v.dtype}; "
            "cast them before attention"
        )
    own = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    every = gather_parts(own, context.name, context.size).flatten(0, 1)
    found = _Reorder.apply(every, keys.take, keys.places, k.shape[1] * k.shape[2])
    return found[0].unflatten(1, k.shape[1:]), found[1].unflatten(1, v.shape[1:])


class _Reorder(torch.autograd.Function):
    """every [M, C] -> rows `take` of its first `columns` columns [Kx, columns] and of the others
    [Kx, C - columns].

    places: int64 [M, 2], where each row went, -1 = nowhere. Reads no gradient that lies at no
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, every: Tensor, take: Tensor, places: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        return every[:, :columns].index_select(0, take), every[:, columns:].index_select(0, take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        nowhere, safe = (places < 0).unbind(1), places.clamp(min=0).unbind(1)
        sums = []
        for grad in grads:
            first, second = (
                grad.index_select(0, at).masked_fill(none[:, None], 0.0)
                for at, none in zip(safe, nowhere, strict=True)
            )
            sums.append(first + second)
        return torch.cat(sums, dim=1), None, None, None


@torch.library.custom_op("packgraph::gather_parts", mutates_args=())
def gather_parts(x: Tensor, group: str, size: int) -> Tensor:
    """Gathers the parts of all ranks: x [...] -> [size, ...], rank r's at [r]. Collective.
    Differentiable: every rank gets the sum of what the ranks say of its part, added up in their
    order (in float32 where x is narrower)."""
    out = x.new_empty(size, *x.shape)
    all_gather_flat(out.flatten(0, 1), x.contiguous(), group=group_of(group))
    return out


gather_parts.register_fake(lambda x, group, size: x.new_empty(size, *x.shape))


gather_parts.register_autograd(
    lambda ctx, grad: (swap_parts(grad, ctx.constants[0]).sum(0), None, None),
    setup_context=save_constants,
)
