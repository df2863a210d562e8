"""A layer with experts whose routing is given, for tests of dispatchers: experts row by row, no
grouped products."""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.moe.peer_read import rows_for

H, WIDTH = 6, 5


class Experts(nn.Module):
    """The stacks of a layer's experts; every row by the matrices of its expert."""

    def __init__(self, count, hidden=H, width=WIDTH, dtype=torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(count)
        self.gate_up_proj = nn.Parameter(
            torch.randn(count, 2 * width, hidden, generator=draw, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.randn(count, hidden, width, generator=draw, dtype=dtype)
        )

    def forward(self, rows):
        row = torch.arange(rows.values.shape[0])
        expert = torch.searchsorted(rows.offsets.long(), row, right=True)
        live = (expert < self.gate_up_proj.shape[0])[:, None]
        expert = expert.clamp(max=self.gate_up_proj.shape[0] - 1)
        gate, up = torch.einsum("rh,rih->ri", rows.values, self.gate_up_proj[expert]).chunk(2, -1)
        act = F.silu(gate) * up * rows.weights[:, None].to(gate.dtype)
        made = torch.einsum("ri,rhi->rh", act, self.down_proj[expert])
        # What no row makes is undefined by the protocol: here it is what would be seen at once.
        return torch.where(live, made, float("nan"))


class Layer(nn.Module):
    """Experts and a dispatcher, under the names that a layer of a model has."""

    def __init__(self, dispatcher, num_experts):
        super().__init__()
        self.experts, self.dispatcher = Experts(num_experts), dispatcher

    def forward(self, x, experts, weights):
        routing = Routing(experts, weights)
        plan = self.dispatcher.preprocess(routing)
        made = self.experts(self.dispatcher.dispatch(x, routing, plan))
        return self.dispatcher.combine(made, plan)


def draw_routing(seed, tokens, places, num_experts, *, padding=0.0, busy=None, dtype=torch.float64):
    """Hidden states [T, H], experts int32 [T, k] without repetition in a row, weights float32 [T,
    k].

    padding: the share of tokens at the end that are routed nowhere. busy: experts that may be
    chosen, None = all.
    """
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(list(range(num_experts) if busy is None else busy))
    order = torch.rand(tokens, len(chosen), generator=draw).argsort(1)[:, :places]
    experts = chosen[order].int()
    weights = torch.rand(tokens, experts.shape[1], generator=draw)
    live = tokens - int(tokens * padding)
    experts[live:], weights[live:] = -1, 0
    return torch.randn(tokens, H, generator=draw, dtype=dtype), experts, weights


def run_layer(layer, x, experts, weights):
    """Output and all gradients of a layer, of a loss in which every element counts differently."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, experts, weights)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        "weights": weights.grad,
        **{name: value.grad.clone() for name, value in layer.experts.named_parameters()},
    }


@dataclass(frozen=True, eq=False)
class EmulatedBuffers:
    """What symmetric buffers are where ranks have no common memory: only what they say of
    themselves. The operations gather everything from everybody then."""

    members: dist.ProcessGroup | None
    pairs: int
    factor: float
    width: int = H
    dtype: torch.dtype = torch.float64
    device: torch.device | None = None
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    peers: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def rows(self):
        return rows_for(
            self.pairs,
            self.factor,
            1 if self.members is None else dist.get_world_size(self.members),
        )

    @property
    def group(self):
        return "" if self.members is None else self.members.group_name

    @property
    def rank(self):
        return 0 if self.members is None else dist.get_rank(self.members)

    def grown(self, factor):
        return replace(self, factor=factor)
