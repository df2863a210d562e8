"""Causal attention within packed documents: one signature, several backends.

    documents   |--- A ---|-- B --|- C -|..padding..|   a row sees the earlier rows of its own
    document only

A backend is a function (q, k, v, meta, scale, options) -> out in a file of its own; BACKENDS names them.
`naive` is the specification and reads boundaries on the host; the others can be captured, and
torch.compile sees one graph around each. All give exact zeros in padding, in the output and in the
gradients, whatever the padding rows of q, k and v held.

    flash    flash-attn-4, if it is installed and knows the device and the head sizes   CUDA, bfloat16, float16
    varlen   torch's own kernel                                                         CUDA, bfloat16, float16
    sdpa     torch's SDPA with a [T, T] mask                                            everywhere

Of the options (options.py) flash and varlen know windows and sinks, sdpa all.
"""  # noqa: E501

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.attention.context import own_heads_back, whole_rows
from packgraph.ops.attention.flash import flash_attention, flash_problems
from packgraph.ops.attention.metadata import AttentionMetadata, attention_metadata
from packgraph.ops.attention.naive import naive_attention
from packgraph.ops.attention.options import PLAIN, ScoreOptions
from packgraph.ops.attention.sdpa import sdpa_attention
from packgraph.ops.attention.varlen import varlen_attention, varlen_problems
from packgraph.ops.attention.zigzag_attention import zigzag_attention

__all__ = [
    "BACKENDS",
    "AttentionMetadata",
    "BackendChoice",
    "ScoreOptions",
    "attention",
    "attention_metadata",
    "choose_backend",
]

Backend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float | None, ScoreOptions], Tensor]
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "naive": naive_attention,
        "sdpa": sdpa_attention,
        "varlen": varlen_attention,
        "flash": flash_attention,
    }
)


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
    gather keys and values (ops/attention/zigzag_attention.py), so the call is collective. options:
    windows and the like, for rows that are not spread. Raises ValueError for shapes that do not fit
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
    if options.needs:
        raise ValueError(
            f"attention over rows that are spread over ranks has no {', '.join(options.needs)}"
        )
    if meta.keys is not None:
        return zigzag_attention(q, k, v, meta, scale, backend)
    return own_heads_back(backend(*whole_rows(q, k, v, context), meta, scale, PLAIN), context)
