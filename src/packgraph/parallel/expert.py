"""Expert parallelism: every rank of a group keeps some experts of each layer, and tokens travel to them.

    ep rank 0   experts 0 1 of every layer   router, attention, norms: copies, as on any replica
    ep rank 1   experts 2 3

The ranks of `ep` are replicas: they see different documents and hold copies of everything but experts. Parameters of
experts are plain tensors that say which part of the whole stack they are: `parallel/data.py` reduces their gradients
over the replicas of the same experts only (`edp`), and checkpoints store them in the stack's name and shape. The
invariant: every rank made the same whole stacks and keeps an equal part of them in order, so weights do not depend on
the layout.
"""
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import ExpertPart, expert_part, mark_experts


class Shared(Protocol):
    """What a dispatcher says about the experts of a layer: the first of this rank, and how many."""

    first: int
    count: int


def split_experts(model: nn.Module, mesh: Mesh, make_dispatcher: Callable[[int, dist.ProcessGroup | None], Shared]
                  ) -> int:
    """Keep this rank's experts in all layers of `model`, in place, and give each layer its dispatcher.

    A layer with experts is a module with the attributes `experts`, whose parameters are stacks [E, ...], and
    `dispatcher`. make_dispatcher: of the number of experts and the ranks that share them (None = this process has all),
    called once per layer. Every rank must hold the same whole stacks; nothing is sent. Make the optimizer afterwards.
    Returns the number of such layers. Raises ValueError for stacks of unequal length, and for experts that were split
    before.
    """
    layers = [(name, module) for name, module in model.named_modules()
              if isinstance(getattr(module, "experts", None), nn.Module) and hasattr(module, "dispatcher")]
    for name, layer in layers:
        stacks = dict(layer.experts.named_parameters())
        counts = {stack.shape[0] for stack in stacks.values()}
        if len(counts) != 1:
            raise ValueError(f"{name}.experts: every parameter must be a stack of the experts, but their lengths are "
                             f"{ {key: stack.shape[0] for key, stack in stacks.items()} }")
        if any(expert_part(stack) is not None for stack in stacks.values()):
            raise ValueError(f"{name}.experts: these experts were split before")
        dispatcher = make_dispatcher(counts.pop(), mesh.group("ep"))
        layer.dispatcher = dispatcher  # type: ignore[assignment]
        if mesh.size("ep") > 1:
            _keep(layer.experts, dispatcher.first, dispatcher.count)
    return len(layers)


@torch.no_grad()
def _keep(experts: nn.Module, first: int, count: int) -> None:
    """Replace every stack by its entries from `first` on."""
    for owner in experts.modules():
        for name, whole in list(owner.named_parameters(recurse=False)):
            kept = nn.Parameter(whole[first : first + count].clone(), requires_grad=whole.requires_grad)
            mark_experts(kept, ExpertPart(whole.shape, (first,) + (0,) * (whole.ndim - 1)))
            setattr(owner, name, kept)
