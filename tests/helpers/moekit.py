"""Experts for tests on every device: operands with poisoned tails, both forms, settings of a
router, and a layer under changing routings."""

from dataclasses import dataclass
from typing import Literal

import torch

from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.experts import Experts, activate_and_multiply, naive_experts
from packgraph.ops.linear import grouped_mm

NAN = float("nan")


@dataclass(frozen=True)
class Settings:
    """What a choice of experts depends on besides logits (`RouterSettings`), with defaults."""

    per_token: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1


def ends_of(numbers: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def poisoned(x: torch.Tensor, used: int) -> torch.Tensor:
    """A copy with NaN in the tail."""
    return torch.cat([x[:used], torch.full_like(x[used:], NAN)])


def run(function, leaves, grad, *rest):
    """[output, gradient of every leaf]."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*leaves, *rest)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def make(
    dtype: torch.dtype,
    rows: int = 20,
    count: int = 3,
    hidden: int = 16,
    width: int = 24,
    device: str = "cpu",
    gated: bool = True,
):
    """values, weights, matrices of the first product (with a gate gate_up), down and a gradient."""
    weights = torch.rand(rows, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    made = [
        torch.randn(rows, hidden).to(dtype),
        weights,
        torch.randn(count, (1 + gated) * width, hidden).to(dtype) / 4,
        torch.randn(count, hidden, width).to(dtype) / 4,
        torch.randn(rows, hidden).to(dtype),
    ]
    return [x.to(device) for x in made]


def by_module(values, weights, matrices, down, offsets, gated=True):
    return activate_and_multiply(
        grouped_mm(values, matrices.mT, offsets), weights, down, offsets, gated
    )


def naive(values, weights, matrices, down, offsets, gated=True):
    return naive_experts(values, weights, offsets, matrices, down, gated)


class Layer(torch.nn.Module):
    """Experts with a residual, and the moves around them; which experts and their weights come from
    outside."""

    def __init__(
        self, count: int = 4, hidden: int = 16, width: int = 8, activation: str = "swiglu"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(count, hidden, width, activation)
        self.scale = torch.nn.Parameter(torch.ones(hidden))
        self.dispatcher = LocalDispatcher(count)

    def forward(self, x, weights, experts):
        routing = Routing(experts, weights)
        plan = self.dispatcher.preprocess(routing)
        rows = self.dispatcher.dispatch(x * self.scale, routing, plan)
        return x + self.dispatcher.combine(self.experts(*rows), plan)


def train(
    module, steps: int, tokens: int = 10, device: str = "cpu", dtype: torch.dtype = torch.float32
):
    """Per step outputs and all gradients, under routings that change: half padding, all padding,
    one expert."""
    torch.manual_seed(1)
    count = next(p for p in module.parameters() if p.dim() == 3).shape[0]
    hidden = next(p for p in module.parameters() if p.dim() == 1).shape[0]
    facts = []
    for step in range(steps):
        experts = torch.randint(-1 if step % 2 else 0, count, (tokens, 2), dtype=torch.int32)
        if step == 3:
            experts.fill_(-1)
        if step == 4:
            experts.fill_(2)
        experts[6 * tokens // 10 :] = -1
        weights = (torch.rand(tokens, 2) * (experts >= 0)).to(device).requires_grad_()
        x = torch.randn(tokens, hidden).to(device, dtype).requires_grad_()
        out = module(x, weights, experts.to(device))
        out.square().sum().backward()
        facts.append(
            [
                out.detach().clone(),
                x.grad,
                weights.grad,
                *(p.grad.clone() for p in module.parameters()),
            ]
        )
    return facts
