"""RMSNorm with what stands around it in a layer, each as one operation with one backward.

    normed_and_kept    x ──┬─ norm ──▶ normed                    of x = norm'(of normed) + of kept
                           └─────────▶ kept, which is x

    added_and_normed   x + branch ──┬─ norm ──▶ normed           of x and branch, both: the same
                                    └─────────▶ total

    normed_and_turned  q, k ── norm of each head ── rotation ──▶ q, k

A backward reads x and the gradients once and writes the gradient of x once. Gradients of weights
are partial sums in float32, added in a fixed order. Everything is computed in float32 and rounded
once, but for `total`, which is normalised as it is returned. Saved are inputs (or `total`) and
weights; the mean of squares is computed again.

Where these take the place of single operations (`ops/elementwise.py`) the tables of
`norm_configs.py` say. On CUDA they are kernels of Triton (`norm_kernel.py`, `rotary_kernel.py`),
elsewhere the operations with `naive_`, which are the specification. Compilers cannot look inside:
what comes out is kept or recomputed as a whole, so compiled layers keep rows before and after a
norm, where they would otherwise compute the latter again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.norm_configs import heads_fuse, normed_way, norms_fuse, turned_way

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def fuses_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether rows x [T, W] are to be normalised by the operations here."""
    return (
        x.dim() == 2
        and _is_plain(weight)
        and _is_plain(x)
        and norms_fuse(x.device, x.dtype, x.shape[0], x.shape[1])
    )


def fuses_turn(q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor) -> bool:
    """Whether heads q [T, Hq, D] and k [T, Hkv, D] are to be normalised and rotated by the
    operation here. cos: [T, R]."""
    return (
        all(map(_is_plain, (q, k, *weights)))
        and cos.shape[-1] == q.shape[-1]
        and heads_fuse(q.device, q.dtype, q.shape[0], (q.shape[1], k.shape[1]), q.shape[2])
    )


def _is_plain(x: Tensor) -> bool:
    """Whether it is no DTensor and the like."""
    return type(x) in (Tensor, torch.nn.Parameter)


def normed_and_kept(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [T, W], scaled by weight [W], and x itself for what it is added to later: the
    gradients of both meet in one pass."""
    normed, kept = _NormedAndKept.apply(x, weight, eps)
    return normed, kept


def added_and_normed(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + branch, both [T, W] of one dtype, and the sum itself. weight: [W]."""
    return _add_norm(x, branch, weight, eps)


def normed_and_turned(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Heads q [T, Hq, D] and k [T, Hkv, D] normalised, scaled by their weights [D] and rotated by
    half-rotation. cos, sin: [T, D], without a gradient. Dtypes of q and k are kept."""
    return _turn(q, k, *weights, eps, cos, sin)


def naive_norm_backward(
    grad: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The specification: gradients of x [..., W] and weight [W] from that of the normalised rows,
    and of x from elsewhere (residual)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value, incoming = x.to(wide), grad.to(wide)
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    unit = value * scale
    of_weight = (incoming * unit).flatten(0, -2).sum(0)
    incoming = incoming * weight.to(wide)
    of_x = scale * (incoming - unit * (incoming * unit).mean(-1, keepdim=True))
    if residual is not None:
        of_x = of_x + residual.to(wide)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of the forward: [..., W], rounded once."""
    value = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * scale * weight.to(value.dtype)).to(x.dtype)


def naive_turn(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification for heads x [T, H, D]: normalised, rotated, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = naive_norm(x.to(wide), weight.to(wide), eps).chunk(2, dim=-1)
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
    of_x, of_weight = naive_norm_backward(back, None, x.to(wide), weight.to(wide), eps)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def _halves_of_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Four:
    first, second = cos.to(dtype)[:, None, :].chunk(2, dim=-1)
    third, fourth = sin.to(dtype)[:, None, :].chunk(2, dim=-1)
    return first, second, third, fourth


@torch.library.custom_op("packgraph::rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, W], contiguous."""
    if not x.is_cuda:
        return naive_norm(x, weight, eps)
    from packgraph.ops.norm_kernel import normalise

    normed = _norm_shape(x, weight, eps)
    normalise(x, None, weight, eps, normed, None, normed_way(x.shape[0]))
    return normed


@torch.library.custom_op("packgraph::added_rms_norm", mutates_args=())
def _add_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised rows and the sum, both [T, W], contiguous. Differentiable in all tensors."""
    if not x.is_cuda:
        total = x + branch
        return naive_norm(total, weight, eps), total
    from packgraph.ops.norm_kernel import normalise

    normed, total = _add_norm_shapes(x, branch, weight, eps)
    normalise(x, branch, weight, eps, normed, total, normed_way(x.shape[0]))
    return normed, total


@torch.library.custom_op("packgraph::rms_norm_backward", mutates_args=())
def _norm_backward(
    grad: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, W] and weight [W]; the latter [0] if it is not wanted."""
    found, of_scale = _norm_backward_shapes(grad, residual, x, weight, eps, of_weight)
    if not x.is_cuda or not x.shape[0]:
        found, made = naive_norm_backward(grad, residual, x, weight, eps)
        return found, made if of_weight else of_scale
    from packgraph.ops.norm_kernel import normalise_backward

    wanted, way = of_scale if of_weight else None, normed_way(x.shape[0])
    normalise_backward(grad, residual, x, weight, eps, found, wanted, way)
    return found, of_scale


@torch.library.custom_op("packgraph::turned_rms_norm", mutates_args=())
def _turn(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the shapes of q and k, contiguous. Differentiable in both and in their weights."""
    if not q.is_cuda:
        return (
            naive_turn(q, q_weight, eps, cos, sin),
            naive_turn(k, k_weight, eps, cos, sin),
        )
    from packgraph.ops.rotary_kernel import turn

    outputs = _turn_shapes(q, k, q_weight, k_weight, eps, cos, sin)
    turn(q, k, (q_weight, k_weight), eps, (cos, sin), outputs, turned_way(q.shape[0]))
    return outputs


@torch.library.custom_op("packgraph::turned_rms_norm_backward", mutates_args=())
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
    from packgraph.ops.rotary_kernel import turn_backward

    turn_backward(
        (q_grad, k_grad),
        q,
        k,
        (q_weight, k_weight),
        eps,
        (cos, sin),
        (of_q, of_k),
        (q_scale, k_scale) if of_weights else None,
        turned_way(q.shape[0]),
    )
    return of_q, of_k, q_scale, k_scale


@_norm.register_fake
def _norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_add_norm.register_fake
def _add_norm_shapes(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_norm_backward.register_fake
def _norm_backward_shapes(
    grad: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if of_weight else 0)


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


class _NormedAndKept(torch.autograd.Function):
    """A function, since an operation cannot return what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, residual: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        of_x, of_weight = _norm_backward(grad, residual, x, weight, ctx.eps, needs_weight)
        return of_x, of_weight if needs_weight else None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)


def _differentiate_sum(ctx: Any, grad: Tensor, residual: Tensor) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    needs_weight = ctx.needs_input_grad[2]
    of_total, of_weight = _norm_backward(grad, residual, total, weight, ctx.eps, needs_weight)
    return of_total, of_total, of_weight if needs_weight else None, None


def _save_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, q_weight, k_weight, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)


def _differentiate_heads(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    _, _, needs_q, needs_k, *_ = ctx.needs_input_grad
    of_q, of_k, of_q_weight, of_k_weight = _turn_backward(
        q_grad, k_grad, q, k, q_weight, k_weight, ctx.eps, cos, sin, needs_q or needs_k
    )
    found = of_q_weight if needs_q else None, of_k_weight if needs_k else None
    return of_q, of_k, *found, None, None, None


_add_norm.register_autograd(_differentiate_sum, setup_context=_save_sum)
_turn.register_autograd(_differentiate_heads, setup_context=_save_heads)
