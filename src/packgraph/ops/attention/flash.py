"""Attention by flash-attn-4 (`flash_attn.cute`): the fastest kernels on Hopper and Blackwell,
compiled at first use.

    rows  0 .. cu_seqlens[-1]     the documents: computed
          cu_seqlens[-1] .. T     padding: the kernels leave these rows of the output and all
                                  gradients UNWRITTEN

    and a tile that crosses the end of a document READS the rows behind it: the next document's, or
        padding. Their
    probability is 0, but 0 times NaN is NaN. So padding is set to zero on the way in too, gradients
    included, unless the caller vouches for finite numbers there (`finite_padding`), as a decoder
    whose padding begins as zeros can.

With grouped queries the backward sums the gradients of keys and values in float32, in memory that
it zeroes for every place of a document, filled or not: T + 128 (N + 1) rows. Where places outweigh
tokens, keys and values are repeated to all heads instead, and their gradients are added up
afterwards.

The kernels are two custom operations with shapes known beforehand, so that torch.compile sees one
graph around them. All that varies is on the device; `longest` is a host bound and `cu_seqlens` has
the capacity's length. The library compiles a kernel for each set of head sizes, dtype and flags
when it is first called (seconds): a call before a capture (a warm-up step, a dry run) does that.

Interface: flash-attn-4 4.0.0b36, https://github.com/Dao-AILab/flash-attention (BSD-3). Its autograd
function is not used, since torch.compile cannot look into it; the functions below it are called
instead.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
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

DTYPES = (torch.bfloat16, torch.float16)
HOPPER, BLACKWELL = 9, (10, 11)  # major compute capabilities
ROWS_PER_PLACE = 128  # rows of float32 sums for each place of a document
MOST_REPEATS = 4
KNOWN = frozenset({"window", "sinks"})
EVERYTHING = -1  # how far a token sees back in its document, where nothing bounds it
_WINDOW_NEEDS = {"window_size_left", "window_size_right"}
_MODULE = "flash_attn.cute.interface"
_FORWARD_NEEDS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "return_lse",
    "out",
    "lse",
}
_BACKWARD_NEEDS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "deterministic",
    "dq",
    "dk",
    "dv",
}


class Kernels(NamedTuple):
    """The functions of flash-attn-4 that launch kernels and know nothing of autograd.

    windows: whether they take a window.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    windows: bool = False


class Library(NamedTuple):
    """flash-attn-4 as it was found: its kernels, or why there are none."""

    kernels: Kernels | None
    reason: str | None


@functools.cache
def library() -> Library:
    """Import flash-attn-4, once per process (about a second)."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(
            "flash_attn"
        )
        why = (
            "flash-attn-4 is not installed"
            if absent
            else f"flash-attn-4 cannot be imported ({error})"
        )
        return Library(None, why)
    forward, backward = (
        getattr(module, name, lambda: None) for name in ("_flash_attn_fwd", "_flash_attn_bwd")
    )
    missing = (_FORWARD_NEEDS - set(inspect.signature(forward).parameters)) | (
        _BACKWARD_NEEDS - set(inspect.signature(backward).parameters)
    )
    if missing:
        return Library(
            None,
            "this version of flash-attn-4 has another interface (4.0.0b36 is known to work): its "
            f"functions do not take {', '.join(sorted(missing))}",
        )
    windows = all(
        set(inspect.signature(function).parameters) >= _WINDOW_NEEDS
        for function in (forward, backward)
    )
    return Library(Kernels(forward, backward, windows), None)


def flash_problems(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    needs: tuple[str, ...] = (),
) -> list[str]:
    """Every reason why flash-attn-4 cannot serve tensors like these with the options `needs`; none
    if it can."""
    if device.type != "cuda":
        return [f"the tensors are on {device}"]
    reasons = lacking(needs, KNOWN)
    reasons += [] if dtype in DTYPES else [f"the dtype is {dtype}, not bfloat16 or float16"]
    major = torch.cuda.get_device_capability(device)[0]
    if major != HOPPER and major not in BLACKWELL:
        reasons.append(f"the device has compute capability {major}.x, not 9.x, 10.x or 11.x")
    elif not _knows_sizes(major, head_dim, value_dim):
        reasons.append(
            f"head sizes {head_dim} (keys) and {value_dim} (values) have no kernel for compute "
            "capability "
            f"{major}.x"
        )
    if not reasons:
        kernels, reason = library()
        if reason is not None:
            reasons.append(reason)
        elif "window" in needs and kernels is not None and not kernels.windows:
            reasons.append("this version of flash-attn-4 takes no window")
    return reasons


def _knows_sizes(major: int, head_dim: int, value_dim: int) -> bool:
    # On Hopper shared memory is laid out for 32 columns and loaded by as many as there are: 24 and
    # 16 did not compile.
    step = 32 if major == HOPPER else 8
    if head_dim % step or value_dim % step:
        return False
    most = 256 if major == HOPPER else 128
    known = major != HOPPER and (head_dim, value_dim) in ((192, 128), (256, 256))
    return known or (8 <= head_dim <= most and 8 <= value_dim <= most)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meta: AttentionMetadata,
    scale: float | None,
    options: ScoreOptions = PLAIN,
) -> Tensor:
    """Attention by flash-attn-4. Shapes as in `attention`; CUDA, bfloat16 or float16.

    The backward repeats bitwise, and does not depend on the capacity, when deterministic algorithms
    are on. Raises ValueError where it cannot run, with all reasons.
    """
    _check_supported(q, v, options)
    if not meta.finite_padding:
        padding, tail = meta.padding_mask[:, None, None], meta.key_tail[:, None, None]
        q, k, v = q.masked_fill(padding, 0.0), k.masked_fill(tail, 0.0), v.masked_fill(tail, 0.0)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    group = q.shape[1] // k.shape[1]
    # Never for bits that are not to depend on the capacity.
    if not deterministic and repeats_heads(k.shape[0], meta.cu_seqlens.shape[0] - 1, group):
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2) for x in (k, v))
    return _forward(
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
        deterministic,
        meta.finite_padding,
        EVERYTHING if options.window is None else options.window - 1,
        options.sinks,
    )[0]


def repeats_heads(tokens: int, documents: int, group: int) -> bool:
    """Returns whether keys and values are repeated for the `group` query heads that share them, at
    a capacity.

    By bytes: the sums that this saves have `tokens + 128 * (documents + 1)` rows of 4 bytes per
    head, the repeated tensors and their gradients `group * tokens` rows of about 6. Still to be
    measured.
    """
    return (
        1 < group <= MOST_REPEATS and tokens + ROWS_PER_PLACE * (documents + 1) > 2 * group * tokens
    )


def _check_supported(q: Tensor, v: Tensor, options: ScoreOptions) -> None:
    if reasons := _problems_of(q.device, q.dtype, q.shape[-1], v.shape[-1], options.needs):
        raise ValueError(
            f"attention backend 'flash' cannot run: {'; '.join(reasons)}. Use "
            "attention_backend='auto'."
        )


@torch.compiler.assume_constant_result
def _problems_of(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    needs: tuple[str, ...],
) -> tuple[str, ...]:
    return tuple(flash_problems(device, dtype, head_dim, value_dim, needs))


@torch.library.custom_op("packgraph::flash_attention", mutates_args=())
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
    deterministic: bool,
    finite: bool,
    left: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """out [T, Hq, Dv], zero in padding; log-sum-exp float32 [Hq, T], not written in padding.

    padding, key_tail, deterministic and finite (whether the gradient of out is finite in padding)
    are for the backward.
    """
    kernels = _kernels()
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    kernels.forward(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest,
        max_seqlen_k=most_keys,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
        out=out,
        lse=lse,
        **_window(left),
    )
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    clear_rows((out,), (padding,))
    return out, lse


@_forward.register_fake
def _forward_shapes(
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
    deterministic: bool,
    finite: bool,
    left: int,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    return out, torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


@torch.library.custom_op("packgraph::flash_attention_backward", mutates_args=())
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
    deterministic: bool,
    clears: bool,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, shaped as q, k and v; in padding zero if `clears`, else not written."""
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    _kernels().backward(
        q,
        k,
        v,
        out,
        grad.contiguous(),
        lse,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest,
        max_seqlen_k=most_keys,
        deterministic=deterministic,
        dq=dq,
        dk=dk,
        dv=dv,
        **_window(left),
    )
    if clears:
        clear_rows((dq, dk, dv), (padding, key_tail, key_tail))
    return dq, dk, dv


_backward.register_fake(
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *rest, ctx.left, sinks = inputs
    *tensors, ctx.longest, ctx.most_keys, ctx.scale, ctx.deterministic, ctx.finite = rest
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], sinks)
    ctx.set_materialize_grads(
        False
    )  # else zeros are made for the log-sum-exp, whose gradient nobody has


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    # With a sink, out and log-sum-exp are those of all keys and the sink: the gradients of scores
    # that the kernel makes of them are then right as they are.
    *saved, padding, key_tail, sinks = ctx.saved_tensors
    grad = grad if ctx.finite else grad.masked_fill(padding[:, None, None], 0.0)
    # Not finite: q, k and v were masked on the way in, and their gradients are on the way out.
    bounds = ctx.longest, ctx.most_keys, ctx.scale, ctx.deterministic, ctx.finite, ctx.left
    dq, dk, dv = _backward(grad, *saved, padding, key_tail, *bounds)
    out, lse = saved[3:5]
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks, padding)
    return (dq, dk, dv, *[None] * 10, of_sinks)


_forward.register_autograd(_differentiate, setup_context=_save)


def _window(left: int) -> dict[str, int]:
    """Arguments of the library for a window: none where there is none."""
    return {} if left == EVERYTHING else {"window_size_left": left, "window_size_right": 0}


def _kernels() -> Kernels:
    kernels, reason = library()
    if kernels is None:
        raise RuntimeError(f"flash-attn-4 was asked to run: {reason}")
    return kernels
