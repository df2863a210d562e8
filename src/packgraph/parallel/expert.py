"""Expert parallelism: every rank of a group keeps some experts of each layer, and tokens travel to
them.

    ep rank 0   experts 0 1 of every layer   router, attention, norms: copies, as on any replica
    ep rank 1   experts 2 3

The ranks of `ep` are replicas: they see different documents and hold copies of everything but
experts. Parameters of experts are plain tensors that say which part of the whole stack they are:
`parallel/data.py` reduces their gradients over the replicas of the same experts only (`edp`), and
checkpoints store them in the stack's name and shape. The invariant: a rank has an equal part of the
stacks, in order, with the values that it has in the whole, so weights do not depend on the layout.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from packgraph.moe.dispatch.dispatcher import Dispatcher
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import Part, mark_part, part_of


def split_experts(
    model: nn.Module,
    mesh: Mesh,
    make_dispatcher: Callable[[int, dist.ProcessGroup | None], Dispatcher],
) -> int:
    """Keep this rank's experts in all layers of `model`, in place, and give each layer its
    dispatcher.

    A layer with experts is a module with the attributes `experts`, whose parameters are stacks [E,
    ...], and `dispatcher`. make_dispatcher: of the number of experts and the ranks that share them
    (None = this process has all), called once per layer. Every rank must hold the same whole
    stacks, or its own part of them since `keep_experts`; nothing is sent. Make the optimizer
    afterwards. Returns the number of such layers. Raises ValueError for stacks of unequal length,
    for another part than the dispatcher's, and for experts that were split before.
    """
    layers = _expert_layers(model)
    for name, layer in layers:
        stacks = dict(layer.experts.named_parameters())
        parts = {key: part_of(stack) for key, stack in stacks.items()}
        lengths = {
            key: stack.shape[0] if (part := parts[key]) is None else part.shape[0]
            for key, stack in stacks.items()
        }
        if len({*lengths.values()}) != 1:
            raise ValueError(
                f"{name}.experts: every parameter must be a stack of the experts, but their "
                "lengths are "
                f"{lengths}"
            )
        count = next(iter(lengths.values()))
        if layer.dispatcher.count != count:
            raise ValueError(f"{name}.experts: these experts were split before")
        dispatcher = make_dispatcher(count, mesh.group("ep"))
        if mesh.size("ep") > 1 and not any(parts.values()):
            _keep(layer.experts, range(dispatcher.first, dispatcher.first + dispatcher.count))
        for key, stack in layer.experts.named_parameters():
            part = part_of(stack)
            here, first = stack.shape[0], 0 if part is None else part.offsets[0]
            if (here, first) != (dispatcher.count, dispatcher.first):
                raise ValueError(
                    f"{name}.experts.{key}: this rank has {here} of {count} experts, from {first} "
                    "on; its "
                    f"dispatcher {dispatcher.count}, from {dispatcher.first} on"
                )
        layer.dispatcher = dispatcher
    return len(layers)


def keep_experts(model: nn.Module, experts: range) -> None:
    """Cut all stacks of `model` down to these experts, in place, before it has memory (device meta)
    or after."""
    for _, layer in _expert_layers(model):
        _keep(layer.experts, experts)


def _expert_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "experts", None), nn.Module) and hasattr(module, "dispatcher")
    ]


@torch.no_grad()
def _keep(experts: nn.Module, mine: range) -> None:
    """Replace every stack by its entries `mine`."""
    for owner in experts.modules():
        for name, whole in list(owner.named_parameters(recurse=False)):
            kept = nn.Parameter(
                whole[mine.start : mine.stop].clone(), requires_grad=whole.requires_grad
            )
            mark_part(
                kept, Part(whole.shape, (mine.start,) + (0,) * (whole.ndim - 1), "expert_copies")
            )
            setattr(owner, name, kept)
