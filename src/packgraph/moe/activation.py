"""The experts' activation with the weights of the routing in it, per row, with or without a gate.

    gated       h [R, 2I]  gate | up     silu(gate) * up * weight     SwiGLU (Shazeer 2020,
                                                                      arXiv:2002.05202)
    ungated     h [R, I]                 relu(h) ** 2 * weight        squared ReLU (So et al. 2021,
                                                                      arXiv:2109.08668)

    forward     act [R, I], of h and weights float32 [R]
    backward    act once more, and the gradients of h and of the weights: one pass over h and the
                incoming gradient

Everything is computed in float32 (float64 in float64) and rounded once. The backward makes the
activation again because the gradient of the next matrix needs it: writing it costs less than
keeping it from the forward on would cost in memory, a third of what an expert layer saves between
its products (without a gate half of it).

Rows from offsets[-1] on are empty: they may hold NaN, `act` and the gradient of h are undefined
there (nothing reads them, see moe/grouped_gemm/products.py), the gradient of the weights is 0. On
CUDA they cost nothing: kernels in moe/activation_kernel.py look up how many rows there are.
"""

import torch
from torch import Tensor

from packgraph.ops.loss import HAS_TRITON


@torch.library.custom_op("packgraph::expert_activation", mutates_args=())
def activation(h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True) -> Tensor:
    """act [R, I]. h: [R, 2I], gate first, or [R, I] without a gate; weights: float32 [R]; offsets:
    int32 [E]."""
    if HAS_TRITON and h.is_cuda and h.dtype != torch.float64:
        from packgraph.moe.activation_kernel import activate

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
    I], of the activation."""
    if HAS_TRITON and h.is_cuda and h.dtype != torch.float64:
        from packgraph.moe.activation_kernel import activate_backward

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


@activation.register_fake
def _activation_shape(h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2 if gated else h.shape[1])


@activation_backward.register_fake
def _backward_shapes(
    grad: Tensor, h: Tensor, weights: Tensor, offsets: Tensor, gated: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), weights.new_empty(weights.shape), grad.new_empty(grad.shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
