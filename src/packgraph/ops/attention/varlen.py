"""Attention by torch's varlen kernel (FlashAttention 2): cost follows the documents, not the
capacity.

    rows  0 .. cu_seqlens[-1]      the documents: computed
          cu_seqlens[-1] .. T      padding: the kernel leaves these rows of out, dq, dk and dv
                                   UNWRITTEN

The unwritten rows may hold anything, NaN included, and NaN times a zero gradient is NaN in every
weight gradient. So they are set to zero, in the output and in all gradients, those that come in
included unless the caller vouches for finite numbers there (`finite_padding`). What the rows of
padding in q, k and v hold does not matter: the kernel clears what lies behind the end of a
document.

The two operations are what `torch.nn.attention.varlen` wraps (the arguments are the same), without
what that adds to every call: a random state for a dropout that is never there, and zero gradients
for two outputs that nobody uses. torch.compile sees one graph around them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.attention.clear_rows import clear_rows
from packgraph.ops.attention.metadata import (
    PLAIN,
    AttentionMetadata,
    ScoreOptions,
    gradient_of_sinks,
    lacking,
    with_sinks,
)
from packgraph.torch_internals import flash_backward, flash_forward

MAX_HEAD_DIM = 256
EVERYTHING = -1  # how far a token sees back in its document, where nothing bounds it
KNOWN = frozenset({"window", "sinks"})


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    scale: float | None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Attention by torch's kernel. Shapes as in `attention`; CUDA, bfloat16 or float16."""
    _check_supported(q, v, options)
    value_dim = v.shape[-1]
    if (
        value_dim < q.shape[-1]
    ):  # the kernel knows one head size; zero columns come out as zero columns
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = _forward(
        q,
        k,
        v,
        meta.cu_seqlens,
        meta.cu_keys,
        meta.padding_mask,
        meta.key_tail,
        meta.longest,
        meta.most_keys,
        scale,
        EVERYTHING if options.window is None else options.window - 1,
        options.sinks,
    )
    out = out[..., :value_dim]
    # A masked copy for the sake of its gradient, which is then zero in padding.
    return out if meta.finite_padding else out.masked_fill(meta.padding_mask[:, None, None], 0.0)


def varlen_problems(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    needs: tuple[str, ...] = (),
) -> list[str]:
    """Every reason why torch's kernel cannot serve tensors like these with the options `needs`;
    none if it can."""
    reasons = {
        f"the tensors are on {device}": device.type != "cuda",
        f"the dtype is {dtype}, not bfloat16 or float16": dtype
        not in (torch.bfloat16, torch.float16),
        f"head_dim is {head_dim}, not a multiple of 8 up to {MAX_HEAD_DIM}": head_dim % 8 != 0
        or head_dim > MAX_HEAD_DIM,
        f"values ({value_dim}) are wider than queries ({head_dim})": value_dim > head_dim,
    }
    return lacking(needs, KNOWN) + [reason for reason, holds in reasons.items() if holds]


def _check_supported(q: Tensor, v: Tensor, options: ScoreOptions) -> None:
    if reasons := varlen_problems(q.device, q.dtype, q.shape[-1], v.shape[-1], options.needs):
        raise ValueError(
            f"attention backend 'varlen' cannot run: {'; '.join(reasons)}. Use "
            "attention_backend='sdpa'."
        )


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    left: int = EVERYTHING,
) -> tuple[Tensor, Tensor]:
    """The kernel: out and log-sum-exp."""
    found = flash_forward(
        q,
        k,
        v,
        cu_seqlens,
        cu_keys,
        longest,
        most_keys,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )
    return found[0], found[1]


def _launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    left: int = EVERYTHING,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel: dq, dk, dv. Repeats bitwise when deterministic algorithms are on: torch looks
    that up itself."""
    no_dropout = (
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    return flash_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens,
        cu_keys,
        longest,
        most_keys,
        0.0,
        True,
        *no_dropout,
        scale=scale,
        window_size_left=left,
        window_size_right=0,
    )


@torch.library.custom_op("packgraph::varlen_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    padding: Tensor,
    key_tail: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    left: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out, shaped as q, zero in padding; log-sum-exp float32 [Hq, T], not written in padding.

    key_tail is for the backward.
    """
    found = _launch_forward(q, k, v, cu_seqlens, cu_keys, longest, most_keys, scale, left)
    out, lse = found if sinks is None else with_sinks(*found, sinks)
    clear_rows((out,), (padding,))
    return out, lse


_forward.register_fake(
    lambda q, *_: (
        torch.empty_like(q),
        torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device),
    )
)


@torch.library.custom_op("packgraph::varlen_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    padding: Tensor,
    key_tail: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, shaped as q, k and v; zero in padding."""
    found = _launch_backward(
        grad.contiguous(), q, k, v, out, lse, cu_seqlens, cu_keys, longest, most_keys, scale, left
    )
    clear_rows(found, (padding, key_tail, key_tail))
    return found


_backward.register_fake(
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.most_keys, ctx.scale, ctx.left, sinks = inputs
    q, k, v, cu_seqlens, cu_keys, padding, key_tail = tensors
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_keys, padding, key_tail, sinks)
    ctx.set_materialize_grads(
        False
    )  # else zeros are made for the log-sum-exp, whose gradient nobody has


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    # With a sink, out and log-sum-exp are those of all keys and the sink: the gradients of scores
    # that the kernel makes of them are then right as they are.
    *saved, sinks = ctx.saved_tensors
    gradients = _backward(grad, *saved, ctx.longest, ctx.most_keys, ctx.scale, ctx.left)
    out, lse, padding = saved[3], saved[4], saved[7]
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks, padding)
    return (*gradients, *[None] * 8, of_sinks)


_forward.register_autograd(_differentiate, setup_context=_save)
