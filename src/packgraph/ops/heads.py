"""RMSNorm of the heads of queries and keys and their rotation as one operation with one backward.

    q, k ── norm of each head, scaled by its weight ── half-rotation ──▶ q, k

Forward and backward each read the heads once and write once what comes out. Everything is computed
in float32 and rounded once. Saved are the inputs; the mean of squares is computed again. Gradients
of weights are partial sums in float32, added in a fixed order.

On CUDA these are kernels of Triton (`heads_kernel.py`), elsewhere the functions with `naive_`,
which are the specification. Compilers cannot look inside: what comes out is kept or recomputed as a
whole.

Which rows it takes follows from shapes, dtypes and the device alone, so that eager calls, compiled
code and replays choose alike. On one H100 (`benchmarks/heads.py`: compiled layers of Qwen3-0.6B in
chunk graphs, varlen attention), a layer over 4,096 tokens takes 1599.7 us with it and 1629.4 us by
the single operations of `elementwise.py`, one over 1,024 tokens 437.2 and 462.2. These stay for
fewer rows, for more than `MOST_NUMBERS` and on other devices, where nothing was measured.
"""

from typing import Any

import torch
from torch import Tensor

from packgraph.ops.grouped_gemm.configs import on_hopper
from packgraph.ops.triton_found import HAS_TRITON

LEAST_ROWS = 1024
MOST_NUMBERS = (
    2**12
)  # of the heads of queries, or of keys, of a token: a program holds them at once
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def turns_heads(
    q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor]
) -> bool:
    """Returns whether heads q [T, Hq, D] and k [T, Hkv, D] are to be normalised and rotated by the
    operation here. tables: cosines and sines [T, R]."""
    operands, head_dim = (q, k, *weights, *tables), q.shape[2]
    return (
        q.shape[0] >= LEAST_ROWS
        and tables[0].shape[-1] == head_dim
        and head_dim >= 2
        and head_dim & (head_dim - 1) == 0
        and max(q.shape[1], k.shape[1]) * head_dim <= MOST_NUMBERS
        and all(map(_is_plain, operands))
        and all(x.dtype in DTYPES and x.device == q.device for x in operands)
        and not any(table.requires_grad for table in tables)
        and is_measured(q.device)
    )


# A constant for compiled code, as the choice of attention is: devices do not change while a process
# runs.
@torch.compiler.assume_constant_result
def is_measured(device: torch.device) -> bool:
    """Returns whether there are kernels for this device and `LEAST_ROWS` holds for it."""
    return HAS_TRITON and on_hopper(device)


def _is_plain(x: Tensor) -> bool:
    """Returns whether `x` is a plain tensor or parameter, no DTensor and the like."""
    return type(x) in (Tensor, torch.nn.Parameter)


def turned_heads(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    tables: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Heads q [T, Hq, D] and k [T, Hkv, D] normalised, scaled by their weights [D] and rotated by
    half-rotation. tables: cosines and sines [T, D], without a gradient. Dtypes of q and k are
    kept."""
    return _turn(q, k, *weights, eps, *tables)


def naive_turn(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification for heads x [T, H, D]: normalised, rotated, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    unit, _ = _normalised(x.to(wide), eps)
    first, second = (unit * weight.to(wide)).chunk(2, dim=-1)
    cos_1, cos_2, sin_1, sin_2 = _halves_of_tables(cos, sin, wide)
    turned = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    return torch.cat(turned, dim=-1).to(x.dtype)


def naive_turn_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification: gradients of x [T, H, D] and weight [D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = grad.to(wide).chunk(2, dim=-1)
    cos_1, cos_2, sin_1, sin_2 = _halves_of_tables(cos, sin, wide)
    back = torch.cat((first * cos_1 + second * sin_2, second * cos_2 - first * sin_1), dim=-1)
    unit, scale = _normalised(x.to(wide), eps)
    of_weight = (back * unit).sum((0, 1))
    back = back * weight.to(wide)
    of_x = scale * (back - unit * (back * unit).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H, D] by its root mean square, and the factor [T, H, 1]."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


def _halves_of_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Four:
    first, second = cos.to(dtype)[:, None, :].chunk(2, dim=-1)
    third, fourth = sin.to(dtype)[:, None, :].chunk(2, dim=-1)
    return first, second, third, fourth


@torch.library.custom_op("packgraph::turned_heads", mutates_args=())
def _turn(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalises and rotates q and k; contiguous. Differentiable in both and in their weights."""
    if not q.is_cuda:
        return (
            naive_turn(q, q_weight, eps, cos, sin),
            naive_turn(k, k_weight, eps, cos, sin),
        )
    from packgraph.ops.heads_kernel import turn

    outputs = _turn_shapes(q, k, q_weight, k_weight, eps, cos, sin)
    turn(q, k, (q_weight, k_weight), eps, (cos, sin), outputs)
    return outputs


@torch.library.custom_op("packgraph::turned_heads_backward", mutates_args=())
def _turn_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    of_weights: bool,
) -> Four:
    """Gradients of q, k and their weights; those of weights [0] if they are not wanted."""
    of_q, of_k, *others = _turn_backward_shapes(
        q_grad, k_grad, q, k, q_weight, k_weight, eps, cos, sin, of_weights
    )
    q_scale, k_scale = others
    if not q.is_cuda or not q.shape[0]:
        of_q, made = naive_turn_backward(q_grad, q, q_weight, eps, cos, sin)
        of_k, other = naive_turn_backward(k_grad, k, k_weight, eps, cos, sin)
        return (of_q, of_k, made, other) if of_weights else (of_q, of_k, q_scale, k_scale)
    from packgraph.ops.heads_kernel import turn_backward

    turn_backward(
        (q_grad, k_grad),
        q,
        k,
        (q_weight, k_weight),
        eps,
        (cos, sin),
        (of_q, of_k),
        (q_scale, k_scale) if of_weights else None,
    )
    return of_q, of_k, q_scale, k_scale


@_turn.register_fake
def _turn_shapes(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_turn_backward.register_fake
def _turn_backward_shapes(
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    of_weights: bool,
) -> Four:
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q_weight.new_empty(q_weight.shape if of_weights else 0),
        k_weight.new_empty(k_weight.shape if of_weights else 0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)


def _differentiate(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    _, _, needs_q, needs_k, *_ = ctx.needs_input_grad
    of_q, of_k, of_q_weight, of_k_weight = _turn_backward(
        q_grad, k_grad, q, k, q_weight, k_weight, ctx.eps, cos, sin, needs_q or needs_k
    )
    found = of_q_weight if needs_q else None, of_k_weight if needs_k else None
    return of_q, of_k, *found, None, None, None


_turn.register_autograd(_differentiate, setup_context=_save)
