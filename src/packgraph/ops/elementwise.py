"""Operations on each token or each number by itself: RMSNorm, SwiGLU, rotary positions, and sums.

RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight, with
statistics in float32. SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up. Rotary positions
(Su et al. 2021, arXiv:2104.09864):

    half-rotation   column i turns with column i + D/2                          Qwen3
    interleaved     column 2i turns with column 2i + 1; what comes out lies     DeepSeek
                    in half-rotation layout: first the left of all pairs, then the right

Scores are sums over columns, so it does not matter how columns lie as long as queries and keys
agree. Cosines and sines are computed once per microbatch from its position_ids and shared by all
layers; positions restart at every document, so packing changes no number. `inv_freq` belongs to the
model: a captured graph reads it, so it must live as long as the graph.

`add_sum` adds the sum of two parts to a total. On CUDA this is one kernel of Triton, which moves
four numbers of an element where two operations move six, with the bits of `naive_add_sum`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.kernels import has_kernel, tl, triton

BLOCK, WARPS = 4096, 8  # elements and warps of a program


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x [..., D] and scale by weight [D]. Returns x's shape and
    dtype."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), weight.to(dtype), eps).to(x.dtype)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification, as in Qwen3: statistics in float32, rounded to x's dtype before the
    weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtype of the inputs.

    Of its operands alone the backward is computed: silu(gate) is not kept, and beside the operands
    and the gradient it is given the backward holds the two that it returns. The bits are those of
    autograd. In compiled code the compiler decides what to keep.
    """
    if torch.compiler.is_compiling() or gate.dtype != up.dtype:
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        gate_wanted, up_wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for gradients of gradients, of which torch's kernel has none
            share = torch.sigmoid(gate)
            of_gate = grad * up * share * (1 + gate * (1 - share)) if gate_wanted else None
            return of_gate, grad * F.silu(gate) if up_wanted else None
        of_gate = grad * up if gate_wanted else None
        if of_gate is not None:
            torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, F.silu(gate).mul_(grad) if up_wanted else None


def naive_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The specification: gate / (1 + exp(-gate)) * up."""
    return gate / (1.0 + torch.exp(-gate)) * up


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta ** (-2i / head_dim) for i in 0 .. head_dim/2 - 1: float32 [head_dim / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (theta**exponents)


def stretched_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Inverse frequencies by YaRN (arXiv:2309.00071, section 3.2): float32 [head_dim / 2] on the
    CPU.

    Pairs that turn beta_fast times or more in original_positions keep theirs, those that turn
    beta_slow times or less get theirs divided by factor, and in between the part that is divided
    grows linearly with the pair's number.
    """
    first, last = (
        _pair_that_turns(turns, head_dim, theta, original_positions)
        for turns in (beta_fast, beta_slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1.0 - ((pairs - first) / (last - first if last != first else 0.001)).clamp(0.0, 1.0)
    wavelengths = theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    )
    return 1.0 / (factor * wavelengths) * (1.0 - kept) + 1.0 / wavelengths * kept


def _pair_that_turns(times: float, head_dim: int, theta: float, positions: int) -> float:
    """Number of the pair, not rounded, that turns so many times in `positions`."""
    return head_dim * math.log(positions / (times * 2 * math.pi)) / (2 * math.log(theta))


def rotary_tables(
    position_ids: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, times `factor`: two [T, D] tensors of `dtype`, computed
    in float32.

    position_ids: int [T]; inv_freq: float32 [D/2].
    """
    angles = position_ids.to(torch.float32)[:, None] * inv_freq[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by the tables [T, R], R <= D; dtypes of q and k are
    kept.

    Only the first R columns turn; without tables, none. interleaved: how these columns of q and k
    are paired; the results are in half-rotation layout either way.
    """
    if cos is None or sin is None:
        return q, k
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotate = _rotate_pairs if interleaved else _rotate
    turned = cos.shape[-1]
    if turned == q.shape[-1]:
        return rotate(q, cos, sin), rotate(k, cos, sin)
    q, k = (torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1) for x in (q, k))
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))
    left, right = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def naive_apply_rotary(
    q: Tensor, k: Tensor, position_ids: Tensor, theta: float, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The specification: pairs of columns as complex numbers, turned by position * theta ** (-2i /
    D)."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        columns: list[Tensor] = [x[..., i] for i in range(x.shape[-1])]
        for i in range(half):
            angle = position_ids.to(torch.float64)[:, None] * theta ** (-2.0 * i / x.shape[-1])
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            real, imaginary = x[..., first].double(), x[..., second].double()
            columns[i] = real * angle.cos() - imaginary * angle.sin()
            columns[i + half] = real * angle.sin() + imaginary * angle.cos()
        return torch.stack(columns, dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def naive_add_sum(total: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The specification: a new tensor, nothing is written."""
    return total + (one + other)


@triton.jit
def _add(total, one, other, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(one + at, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    found = found.to(total.dtype.element_ty).to(tl.float32)
    found += tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


@torch.library.custom_op("packgraph::add_sum_of_two", mutates_args=("total",))
def add_sum_of_two(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one + other, the sum of both rounded before it is added. All [size], contiguous, of
    one dtype of at most 32 bits."""
    size = total.numel()
    if size:  # a grid of no programs is an error
        _add[(triton.cdiv(size, BLOCK),)](total, one, other, size, BLOCK=BLOCK, num_warps=WARPS)


def add_sum(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one + other, the sum rounded to the dtype before it is added.

    All are [size], contiguous and of one dtype.
    """
    if has_kernel(total):
        add_sum_of_two(total, one, other)
    else:
        total.add_(torch.add(one, other))
