"""RMSNorm of the heads of queries and keys and their rotation as one operation with one backward.

    q, k ── norm of each head, scaled by its weight ── half-rotation ──▶ q, k

Forward and backward each read the heads once and write once what comes out. Everything is computed
in float32 and rounded once. Saved are the inputs; the mean of squares is computed again. On CUDA
these are kernels of Triton, elsewhere the functions with `naive_`, which are the specification:

    forward     a program has all heads of a token: queries, then keys; cosines and sines are read
                once
    backward    a program goes over some tokens; what their heads add to the gradients of the two
                weights stays in registers and leaves as one partial sum [2 D] in float32
    then        partial sums of all programs are added in their order, rounded once

A head is held in halves, since column i turns with column i + D/2. Which program has which tokens
follows from shapes alone, and nothing is atomic, so results repeat bitwise. Compilers cannot look
inside: what comes out is kept or recomputed as a whole.

Which rows it takes follows from shapes, dtypes and the device alone, so that eager calls, compiled
code and replays choose alike. On one H100 (`benchmarks/heads.py`: compiled layers of Qwen3-0.6B in
chunk graphs, varlen attention), a layer over 4,096 tokens takes 1599.7 us with it and 1629.4 us by
the single operations of `elementwise.py`, one over 1,024 tokens 437.2 and 462.2. These stay for
fewer rows, for more than `MOST_NUMBERS` and on other devices, where nothing was measured.
"""

from typing import Any

import torch
from torch import Tensor

from packgraph.ops.grouped_gemm import on_hopper
from packgraph.ops.kernels import FLOATS, HAS_TRITON, aligned, tl, triton

LEAST_ROWS = 1024
MOST_NUMBERS = 2**12  # of a token's heads of queries, or of keys: a program holds them at once
WARPS, BACKWARD_WARPS = 4, 2  # of a program, which has all heads of a token at once
PROGRAMS = 528  # of a backward, at most; each makes one partial sum
PARTS, PART_COLUMNS = 256, 8  # tile of the partial sums that are added at once
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
        and all(x.dtype in FLOATS and x.device == q.device for x in operands)
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


@triton.jit
def _halves(start, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two halves of what begins at `start`, in float32; 0 where masked."""
    first = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _scale(first, second, real, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / root of the mean of squares of each head [WIDE, 1], 0 where there is none."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.where(real, tl.rsqrt(squares / (2 * HALF) + eps)[:, None], 0.0)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, token, stride, eps,
    HEADS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the HEADS heads of a token."""
    column = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, WIDE)[:, None]
    mask = (head < HEADS) & (column < HALF)
    first, second = _halves(x + token * stride + head * (2 * HALF) + column, mask, HALF)
    scale = _scale(first, second, head < HEADS, eps, HALF)
    own = column < HALF
    weight_1, weight_2 = _halves(weight + column, own, HALF)
    cos_1, cos_2 = _halves(cos + token * (2 * HALF) + column, own, HALF)
    sin_1, sin_2 = _halves(sin + token * (2 * HALF) + column, own, HALF)
    first, second = first * scale * weight_1, second * scale * weight_2
    there = out + token * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    kind = out.dtype.element_ty
    tl.store(there, (first * cos_1 - second * sin_1).to(kind), mask=mask)
    tl.store(there + HALF, (second * cos_2 + first * sin_2).to(kind), mask=mask)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, q_weight, k_weight, cos, sin, q_out, k_out, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, Q_WIDE: tl.constexpr, K_HEADS: tl.constexpr, K_WIDE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _turn(q, q_weight, cos, sin, q_out, token, q_stride, eps, Q_HEADS, Q_WIDE, HALF)
    _turn(k, k_weight, cos, sin, k_out, token, k_stride, eps, K_HEADS, K_WIDE, HALF)


@triton.jit
def _turn_back(  # type: ignore[no-untyped-def]
    grad, x, weight, cos, sin, of_x, token, live, grad_stride, stride, eps, sums_1, sums_2,
    HEADS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a token's heads; returns the sums [WIDE, HALF] with what these add."""
    column = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, WIDE)[:, None]
    mask = (head < HEADS) & (column < HALF) & live
    first, second = _halves(x + token * stride + head * (2 * HALF) + column, mask, HALF)
    scale = _scale(first, second, (head < HEADS) & live, eps, HALF)
    unit_1, unit_2 = first * scale, second * scale
    own = (column < HALF) & live
    weight_1, weight_2 = _halves(weight + column, column < HALF, HALF)
    cos_1, cos_2 = _halves(cos + token * (2 * HALF) + column, own, HALF)
    sin_1, sin_2 = _halves(sin + token * (2 * HALF) + column, own, HALF)
    in_1, in_2 = _halves(grad + token * grad_stride + head * (2 * HALF) + column, mask, HALF)
    back_1, back_2 = in_1 * cos_1 + in_2 * sin_2, in_2 * cos_2 - in_1 * sin_1
    sums_1 += back_1 * unit_1
    sums_2 += back_2 * unit_2
    back_1, back_2 = back_1 * weight_1, back_2 * weight_2
    mean = (tl.sum(back_1 * unit_1, 1) + tl.sum(back_2 * unit_2, 1))[:, None] / (2 * HALF)
    there = of_x + token * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    kind = of_x.dtype.element_ty
    tl.store(there, (scale * (back_1 - unit_1 * mean)).to(kind), mask=mask)
    tl.store(there + HALF, (scale * (back_2 - unit_2 * mean)).to(kind), mask=mask)
    return sums_1, sums_2


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    q_grad, k_grad, q, k, q_weight, k_weight, cos, sin, of_q, of_k, partial, rows, steps,
    q_grad_stride, k_grad_stride, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, Q_WIDE: tl.constexpr, K_HEADS: tl.constexpr, K_WIDE: tl.constexpr,
    HALF: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    q_1 = tl.zeros([Q_WIDE, HALF], tl.float32)
    q_2 = tl.zeros([Q_WIDE, HALF], tl.float32)
    k_1 = tl.zeros([K_WIDE, HALF], tl.float32)
    k_2 = tl.zeros([K_WIDE, HALF], tl.float32)
    for step in range(steps):
        token = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        live = token < rows
        q_1, q_2 = _turn_back(
            q_grad, q, q_weight, cos, sin, of_q, token, live, q_grad_stride, q_stride, eps,
            q_1, q_2, Q_HEADS, Q_WIDE, HALF,
        )  # fmt: skip
        k_1, k_2 = _turn_back(
            k_grad, k, k_weight, cos, sin, of_k, token, live, k_grad_stride, k_stride, eps,
            k_1, k_2, K_HEADS, K_WIDE, HALF,
        )  # fmt: skip
    if WEIGHTS:
        here = partial + tl.program_id(0).to(tl.int64) * (4 * HALF) + tl.arange(0, HALF)
        tl.store(here, tl.sum(q_1, 0))
        tl.store(here + HALF, tl.sum(q_2, 0))
        tl.store(here + 2 * HALF, tl.sum(k_1, 0))
        tl.store(here + 3 * HALF, tl.sum(k_2, 0))


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    partial, first, second, parts,
    SIZE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add partial sums [parts, 2 SIZE]: the left half is for `first`, the right for `second`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([PARTS, COLUMNS], tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (column < 2 * SIZE)[None, :]
        place = part.to(tl.int64)[:, None] * (2 * SIZE) + column[None, :]
        sums += tl.load(partial + place, mask=inside, other=0.0)
    found = tl.sum(sums, 0)
    tl.store(first + column, found.to(first.dtype.element_ty), mask=column < SIZE)
    behind = (column >= SIZE) & (column < 2 * SIZE)
    tl.store(second + (column - SIZE), found.to(second.dtype.element_ty), mask=behind)


def turn(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    tables: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Fill outputs, contiguous, of the shapes of q [T, Hq, D] and k [T, Hkv, D]. weights: [D] of q
    and k. tables: cosines and sines [T, D]."""
    q, k = _in_rows(q), _in_rows(k)
    if q.shape[0]:
        _forward[(q.shape[0],)](
            q,
            k,
            *map(_whole, (*weights, *tables)),
            *outputs,
            q.stride(0),
            k.stride(0),
            eps,
            **_sizes(q, k),
            num_warps=WARPS,
        )


def turn_backward(
    grads: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    tables: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    of_weights: tuple[Tensor, Tensor] | None,
    most_programs: int = PROGRAMS,
) -> None:
    """Fill outputs, contiguous, of the shapes of q and k, and of_weights [D]. T > 0. most_programs:
    that go over tokens."""
    q, k, q_grad, k_grad = (_in_rows(x) for x in (q, k, *grads))
    rows = q.shape[0]
    steps = triton.cdiv(rows, most_programs)
    programs = triton.cdiv(rows, steps)
    parts = 0 if of_weights is None else programs
    partial = q.new_empty(parts, 2 * q.shape[2], dtype=torch.float32)
    _backward[(programs,)](
        q_grad,
        k_grad,
        q,
        k,
        *map(_whole, (*weights, *tables)),
        *outputs,
        partial,
        rows,
        steps,
        q_grad.stride(0),
        k_grad.stride(0),
        q.stride(0),
        k.stride(0),
        eps,
        **_sizes(q, k),
        WEIGHTS=of_weights is not None,
        num_warps=BACKWARD_WARPS,
    )
    if of_weights is not None:
        _add_parts[(triton.cdiv(partial.shape[1], PART_COLUMNS),)](
            partial,
            *of_weights,
            parts,
            SIZE=q.shape[2],
            PARTS=PARTS,
            COLUMNS=PART_COLUMNS,
            num_warps=4,
        )


def _in_rows(x: Tensor) -> Tensor:
    """x [T, ...], or a copy in which what belongs to a row is adjacent and in order, and which
    begins where kernels like it: the order of their sums follows from shapes and strides alone."""
    return aligned(x if x[:1].is_contiguous() else x.contiguous())


def _whole(x: Tensor) -> Tensor:
    return aligned(x.contiguous())


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    return {
        "Q_HEADS": q.shape[1],
        "Q_WIDE": triton.next_power_of_2(q.shape[1]),
        "K_HEADS": k.shape[1],
        "K_WIDE": triton.next_power_of_2(k.shape[1]),
        "HALF": q.shape[2] // 2,
    }


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
    return _turned(q, k, *weights, eps, *tables)


@torch.library.custom_op("packgraph::turned_heads", mutates_args=())
def _turned(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalises and rotates q and k; contiguous. Differentiable in both and in their weights."""
    if not q.is_cuda:
        return (
            naive_turn(q, q_weight, eps, cos, sin),
            naive_turn(k, k_weight, eps, cos, sin),
        )
    outputs = _turned_shapes(q, k, q_weight, k_weight, eps, cos, sin)
    turn(q, k, (q_weight, k_weight), eps, (cos, sin), outputs)
    return outputs


@torch.library.custom_op("packgraph::turned_heads_backward", mutates_args=())
def _turned_backward(
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
    of_q, of_k, *others = _turned_backward_shapes(
        q_grad, k_grad, q, k, q_weight, k_weight, eps, cos, sin, of_weights
    )
    q_scale, k_scale = others
    if not q.is_cuda or not q.shape[0]:
        of_q, made = naive_turn_backward(q_grad, q, q_weight, eps, cos, sin)
        of_k, other = naive_turn_backward(k_grad, k, k_weight, eps, cos, sin)
        return (of_q, of_k, made, other) if of_weights else (of_q, of_k, q_scale, k_scale)
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


@_turned.register_fake
def _turned_shapes(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_turned_backward.register_fake
def _turned_backward_shapes(
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
    of_q, of_k, of_q_weight, of_k_weight = _turned_backward(
        q_grad, k_grad, q, k, q_weight, k_weight, ctx.eps, cos, sin, needs_q or needs_k
    )
    found = of_q_weight if needs_q else None, of_k_weight if needs_k else None
    return of_q, of_k, *found, None, None, None


_turned.register_autograd(_differentiate, setup_context=_save)
