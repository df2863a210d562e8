"""The experts of one rank: two grouped products and the activation between them, without a host
sync.

    gated      values [R, H]  @ gate_up^T -->  h [R, 2I]  silu(gate) * up * weight -->  act [R, I]
    ungated    values [R, H]  @ up^T -------> h [R, I]   relu(h) ** 2 * weight ----->  act [R, I]
    both       act [R, I]     @ down^T -----> [R, H]

The weights of the routing enter before the second product. So its outputs need not be saved for the
weights' gradient, and combining rows is a plain sum (Megatron-Core's technical report, arXiv
2603.07685). Kept for the backward: values and h; the activation is made again. Rows from
offsets[-1] on are read nowhere, and undefined in the result.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from packgraph.ops.kernels import by_rows, has_kernel, save_inputs, tl, triton
from packgraph.ops.linear import autocast, matrices_gradient, product, rows_gradient
from packgraph.ops.names import NATIVE

TILE_ROWS, TILE_COLUMNS = 4, 512


def naive_experts(
    values: Tensor,
    weights: Tensor,
    offsets: Tensor,
    matrices: Tensor,
    down: Tensor,
    gated: bool = True,
) -> Tensor:
    """The specification: each expert an MLP on its rows; each output times its weight. Zero in the
    tail.

    matrices: [E, 2I, H], gate rows first, or [E, I, H] without a gate.
    """
    start, parts = 0, []
    for end, first, second in zip(offsets.tolist(), matrices, down):
        h = values[start:end] @ first.t()
        if gated:
            gate, up = h.chunk(2, dim=1)
            act = gate * torch.sigmoid(gate) * up
        else:
            act = torch.where(h > 0, h * h, 0.0)
        parts.append((act @ second.t()) * weights[start:end, None].to(values.dtype))
        start = end
    return torch.cat([*parts, values.new_zeros(values.shape[0] - start, down.shape[1])])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    h, weights, offsets, out, experts, width, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    total = tl.load(offsets + experts - 1)
    if tl.program_id(0) * ROWS < total:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < total)[:, None] & (column < width)[None, :]
        here = h + row.to(tl.int64)[:, None] * stride + column[None, :]
        first = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weights + row, mask=row < total, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(here + width, mask=mask, other=0.0).to(tl.float32)
            plain = first / (1.0 + tl.exp(-first)) * up
        else:
            plain = tl.where(first <= 0.0, 0.0, first * first)  # NaN stays NaN
        tl.store(
            out + row.to(tl.int64)[:, None] * width + column[None, :],
            plain * weight[:, None],
            mask=mask,
        )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, h, weights, offsets, of_h, of_weights, act, experts, rows, stride, grad_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    total = tl.load(offsets + experts - 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None]
    dot = tl.zeros([ROWS], tl.float32)
    if tl.program_id(0) * ROWS < total:
        weight = tl.load(weights + row, mask=row < total, other=0.0).to(tl.float32)[:, None]
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            mask = (row < total)[:, None] & (column < WIDTH)
            incoming = tl.load(grad + place * grad_stride + column, mask=mask, other=0.0).to(
                tl.float32
            )
            here = tl.load(h + place * stride + column, mask=mask, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(h + place * stride + column + WIDTH, mask=mask, other=0.0).to(
                    tl.float32
                )
                chance = 1.0 / (1.0 + tl.exp(-here))
                silu = here * chance
                plain = silu * up
                of_gate = incoming * weight * up * (chance * (1.0 + here * (1.0 - chance)))
                tl.store(of_h + place * (2 * WIDTH) + column, of_gate, mask=mask)
                tl.store(
                    of_h + place * (2 * WIDTH) + column + WIDTH, incoming * weight * silu, mask=mask
                )
            else:
                kept = tl.where(here <= 0.0, 0.0, here)
                plain = kept * kept
                tl.store(of_h + place * WIDTH + column, incoming * weight * (2.0 * kept), mask=mask)
            dot += tl.sum(incoming * plain, 1)
            tl.store(act + place * WIDTH + column, plain * weight, mask=mask)
    tl.store(of_weights + row, dot, mask=row < rows)


def activate(h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True) -> Tensor:
    """Launches `activation`: [R, I]."""
    h = by_rows(h)
    rows, width = h.shape[0], h.shape[1] // 2 if gated else h.shape[1]
    out = h.new_empty(rows, width)
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _forward[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, columns))](
            h,
            weights.contiguous(),
            offsets.contiguous(),
            out,
            offsets.shape[0],
            width,
            h.stride(0),
            ROWS=TILE_ROWS,
            COLUMNS=columns,
            GATED=gated,
        )
    return out


def activate_backward(
    grad: Tensor, h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `activation_backward`: gradients of h and weights [R], and the activation [R, I]."""
    h, grad = by_rows(h), by_rows(grad)
    rows, width = grad.shape
    of_h, of_weights, act = (
        h.new_empty(h.shape),
        weights.new_empty(rows),
        grad.new_empty(rows, width),
    )
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    if rows:
        _backward[(triton.cdiv(rows, TILE_ROWS),)](
            grad,
            h,
            weights.contiguous(),
            offsets.contiguous(),
            of_h,
            of_weights,
            act,
            offsets.shape[0],
            rows,
            h.stride(0),
            grad.stride(0),
            WIDTH=width,
            ROWS=TILE_ROWS,
            COLUMNS=columns,
            GATED=gated,
        )
    return of_h, of_weights, act


@torch.library.custom_op("packgraph::expert_activation", mutates_args=())
def activation(h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True) -> Tensor:
    """act [R, I]. h: [R, 2I], gate first, or [R, I] without a gate; weights: float32 [R]; offsets:
    int32 [E].

    The weights of the routing are in it, per row, with or without a gate:

        gated       silu(gate) * up * weight     SwiGLU (Shazeer 2020, arXiv:2002.05202)
        ungated     relu(h) ** 2 * weight        squared ReLU (So et al. 2021, arXiv:2109.08668)

    Computed in float32 (float64 in float64) and rounded once. Rows from offsets[-1] on are empty:
    they may hold NaN, and the result is undefined there. On CUDA they cost nothing: programs behind
    the last offset read and write nothing.
    """
    if has_kernel(h):
        return activate(h, weights, offsets, gated)
    weight = weights[:, None]
    if not gated:
        return (torch.relu(_wide(h)).square() * weight).to(h.dtype)
    gate, up = _wide(h).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * weight).to(h.dtype)


@torch.library.custom_op("packgraph::expert_activation_backward", mutates_args=())
def activation_backward(
    grad: Tensor, h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of its shape, and of weights [R], and the activation [R, I] itself. grad: [R,
    I], of the activation.

    One pass over h and the incoming gradient. It makes the activation again because the gradient of
    the next matrix needs it: writing it costs less than keeping it from the forward on would cost
    in memory, a third of what an expert layer saves between its products (without a gate half of
    it). In empty rows the gradient of the weights is 0. A program goes over a row from left to
    right, so that gradient is a sum in a fixed order.
    """
    if has_kernel(h):
        return activate_backward(grad, h, weights, offsets, gated)
    wide, weight = _wide(grad), weights[:, None]
    if gated:
        gate, up = _wide(h).chunk(2, dim=1)
        chance = torch.sigmoid(gate)
        silu = gate * chance
        plain = silu * up
        of_gate = wide * weight * up * (chance * (1 + gate * (1 - chance)))
        of_h = torch.cat([of_gate, wide * weight * silu], dim=1)
    else:
        kept = torch.relu(_wide(h))
        plain = kept.square()
        of_h = wide * weight * (2 * kept)
    live = torch.arange(h.shape[0], device=h.device) < offsets[-1]
    of_weights = torch.where(live, (wide * plain).sum(1), 0)
    return of_h.to(h.dtype), of_weights.to(weights.dtype), (plain * weight).to(h.dtype)


activation.register_fake(
    lambda h, weights, offsets, gated=True: h.new_empty(
        h.shape[0], h.shape[1] // 2 if gated else h.shape[1]
    )
)


activation_backward.register_fake(
    lambda grad, h, weights, *_: (
        h.new_empty(h.shape),
        weights.new_empty(weights.shape),
        grad.new_empty(grad.shape),
    )
)


class Experts(nn.Module):
    """`count` experts. gate_up_proj: [count, 2I, H], gate rows first, or without a gate up_proj:
    [count, I, H]; down_proj: [count, H, I].

    count: the experts of this rank. activation: swiglu has a gate, relu2 has none. by:
    name of their product (ops/linear.py). Weights begin as normal numbers of deviation 0.02.
    """

    gate_up_proj: nn.Parameter
    up_proj: nn.Parameter

    def __init__(
        self,
        count: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Literal["swiglu", "relu2"] = "swiglu",
        by: str = NATIVE,
    ) -> None:
        super().__init__()
        self.gated, self.by = activation == "swiglu", by
        if self.gated:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * intermediate_size, hidden_size))
        else:
            self.up_proj = nn.Parameter(torch.empty(count, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, intermediate_size))
        self.reset_parameters()

    @property
    def first_proj(self) -> nn.Parameter:
        """The matrices of the first product, whatever they are called: [count, columns of h, H]."""
        return self.gate_up_proj if self.gated else self.up_proj

    def reset_parameters(self) -> None:
        """Fresh weights."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, values: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Rows of experts: [R, H] -> [R, H], of values' dtype (autocast: of that); undefined from
        offsets[-1] on.

        values: [R, H], rows by expert. weights: float32 [R], of the routing. offsets: int32
        [count], where the rows of each expert end.
        """
        return self.second(self.first(values, offsets), weights, offsets)

    def first(self, values: Tensor, offsets: Tensor) -> Tensor:
        """The product before the activation: h [R, 2I], without a gate [R, I]."""
        values, matrices = autocast(values, self.first_proj)
        # Not by a view: the backward then reads the parameter itself.
        return product(values, matrices, offsets, True, self.by)

    def second(self, h: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """The activation and the product after it: [R, H]."""
        return activate_and_multiply(h, weights, self.down_proj, offsets, self.gated, self.by)

    def extra_repr(self) -> str:
        count, hidden_size, intermediate_size = self.down_proj.shape
        gate = "" if self.gated else ", no gate"
        return (
            f"count={count}, hidden_size={hidden_size}, intermediate_size={intermediate_size}{gate}"
        )


def activate_and_multiply(
    h: Tensor,
    weights: Tensor,
    down: Tensor,
    offsets: Tensor,
    gated: bool = True,
    by: str = NATIVE,
) -> Tensor:
    """`activation(h, weights, offsets, gated)` @ down[e]^T for the rows of every expert e: [R, H].

    h: [R, 2I], gate first, or [R, I] without a gate. weights: float32 [R]. down: [E, H, I].
    offsets: int32 [E]. by: name of the product.
    """
    h, down = autocast(h, down)
    return _second_half(h, weights, down, offsets, gated, by)


@torch.library.custom_op("packgraph::activate_and_multiply", mutates_args=())
def _second_half(
    h: Tensor, weights: Tensor, down: Tensor, offsets: Tensor, gated: bool, by: str
) -> Tensor:
    """One operation, since its backward keeps h and not the activation."""
    return product(activation(h, weights, offsets, gated), down, offsets, True, by)


_second_half.register_fake(lambda h, weights, down, *_: h.new_empty(h.shape[0], down.shape[1]))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    h, weights, down, offsets = ctx.saved_tensors
    gated, by = ctx.constants
    of_act = rows_gradient(grad, down, offsets, True, by)
    of_h, of_weights, act = activation_backward(of_act, h, weights, offsets, gated)
    needs_down = ctx.needs_input_grad[2]
    of_down = matrices_gradient(grad, act, offsets, True, by) if needs_down else None
    return of_h, of_weights, of_down, None, None, None


_second_half.register_autograd(_differentiate, setup_context=save_inputs)
