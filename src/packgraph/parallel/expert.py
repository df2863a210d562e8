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
from packgraph.parallel.deferred import on_meta, whole_shape
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
    ...], and `dispatcher`; or one whose own parameters are the stacks, with `dispatching`, which
    has the dispatcher. make_dispatcher: of the number of experts and the ranks that share them
    (None = this process has all), called once per layer. Every rank must hold the same whole
    stacks, or its own part of them since `keep_experts`; nothing is sent. Stacks may be deferred.
    Make the optimizer afterwards. Returns the number of such layers. Raises ValueError for stacks
    of unequal length, for another part than the dispatcher's, and for experts that were split
    before.
    """
    with on_meta(model):
        layers = _expert_layers(model)
        for name, experts, owner in layers:
            owner.dispatcher = _split(name, experts, owner.dispatcher, mesh, make_dispatcher)
    return len(layers)


def _split(
    name: str,
    experts: nn.Module,
    now: Dispatcher,
    mesh: Mesh,
    make_dispatcher: Callable[[int, dist.ProcessGroup | None], Dispatcher],
) -> Dispatcher:
    """The same for the stacks of one layer, which is called `name` and has the dispatcher `now`."""
    stacks = dict(experts.named_parameters())
    lengths = {key: whole_shape(stack)[0] for key, stack in stacks.items()}
    if len({*lengths.values()}) != 1:
        raise ValueError(
            f"{name}: every parameter must be a stack of the experts, but their "
            "lengths are "
            f"{lengths}"
        )
    count = next(iter(lengths.values()))
    if now.count != count:
        raise ValueError(f"{name}: these experts were split before")
    dispatcher = make_dispatcher(count, mesh.group("ep"))
    if mesh.size("ep") > 1 and not any(map(part_of, stacks.values())):
        _keep(experts, range(dispatcher.first, dispatcher.first + dispatcher.count))
    for key, stack in experts.named_parameters():
        part = part_of(stack)
        here, first = stack.shape[0], 0 if part is None else part.offsets[0]
        if (here, first) != (dispatcher.count, dispatcher.first):
            raise ValueError(
                f"{name}.{key}: this rank has {here} of {count} experts, from {first} "
                "on; its "
                f"dispatcher {dispatcher.count}, from {dispatcher.first} on"
            )
    return dispatcher


def keep_experts(model: nn.Module, experts: range) -> None:
    """Cut all stacks of `model` down to these experts, in place, before it has memory (device meta)
    or after."""
    for _, stacks, _ in _expert_layers(model):
        _keep(stacks, experts)


def _expert_layers(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """The stacks of each layer, by name, and what has its dispatcher."""
    found: list[tuple[str, nn.Module, Any]] = []
    for name, module in model.named_modules():
        stacks = getattr(module, "experts", None)
        if isinstance(owner := getattr(module, "dispatching", None), nn.Module):
            found.append((name, module, owner))
        elif isinstance(stacks, nn.Module) and hasattr(module, "dispatcher"):
            found.append((f"{name}.experts", stacks, module))
    return found


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
