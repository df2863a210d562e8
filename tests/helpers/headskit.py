"""A reference in float64 for heads that are normalised and rotated, from the single operations; how
far results of a dtype may be from it; and layers that take the operation on any device."""

import torch
from torch import Tensor

from packgraph.ops import heads
from packgraph.ops.elementwise import (
    apply_rotary,
    inverse_frequencies,
    naive_rms_norm,
    rotary_tables,
)

EPS = 1e-6
# Relative to the largest number of a result: computed in float32 and rounded once. Gradients of
# weights are sums over rows of products that are exact to float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def assert_near(found: list[Tensor], expected: list[Tensor], rounding: float = 1.0) -> None:
    """Each as near to its reference as its dtype allows, times `rounding`."""
    for number, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        assert ours.shape == exact.shape, number
        distance = (ours.double() - exact).abs().max()
        limit = rounding * TOLERANCE[ours.dtype] * exact.abs().max()
        assert distance <= limit, f"result {number}: {distance:.3g} apart, at most {limit:.3g}"


def differentiated(function, leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Outputs of `function` and gradients of all leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, grads)
    return [*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)]


def exact(function, leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The same in float64."""
    return differentiated(function, [x.double() for x in leaves], [x.double() for x in grads])


def turned_reference(cos: Tensor, sin: Tensor):
    """`turned_heads` by single operations, a function of q, k and their weights."""

    def turned(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor):
        normed = naive_rms_norm(q, q_weight, EPS), naive_rms_norm(k, k_weight, EPS)
        return apply_rotary(*normed, cos.to(q.dtype), sin.to(q.dtype))

    return turned


def tables(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions that begin anew in the middle."""
    positions = torch.arange(tokens) % (tokens // 2 + 1)
    return rotary_tables(positions, inverse_frequencies(head_dim, 1e4), dtype)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Normal numbers, the same for the same shapes."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def take_everywhere(monkeypatch) -> None:
    """Layers take the operation whatever the device and the number of rows."""
    monkeypatch.setattr(heads, "is_measured", lambda device: True)
    monkeypatch.setattr(heads, "LEAST_ROWS", 0)
