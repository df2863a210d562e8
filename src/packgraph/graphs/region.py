"""One captured region: its static tensors, and how a replay reads and writes them.

A region's forward is one graph, its backward another; an autograd function ties the two into the user's autograd
graph. Inputs that an earlier region of the same slot has produced are baked pointers: nothing is copied. Everything
that comes from eager code is copied into slot buffers first. Outputs are aliases of static memory; the caller clones
those that leave for eager code.
"""
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from packgraph.graphs.backend import Graph, Static
from packgraph.graphs.parameters import GradientBuffers
from packgraph.graphs.slot import Ticket
from packgraph.plan.stages import State


@dataclass
class Input:
    """A tensor that a region reads: leaf `leaf` of `state[key]`.

    buffer: slot memory it is copied into at every replay, or None when its pointer is baked. differentiable: autograd
    wants its gradient. gradient: where the backward graph leaves it. lend: hand the gradient out as an alias of static
    memory (its only reader is an earlier region of this slot) instead of a clone.
    """

    key: str
    leaf: int
    shape: torch.Size
    buffer: torch.Tensor | None
    differentiable: bool
    lend: bool
    gradient: Static | None = None


@dataclass
class Output:
    """A tensor that a region makes. incoming: where its backward graph expects the gradient, None = not captured."""

    static: Static
    differentiable: bool
    incoming: Any = None


@dataclass
class Region:
    """The graphs of one region in one variant. entries: per key of the result state, how to make its value."""

    number: int
    name: str
    forward: Graph
    inputs: list[Input]
    outputs: list[Output]
    entries: dict[str, "Passed | Made"]
    backward: Graph | None = None
    owned: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    returned: list[tuple[torch.nn.Parameter, Static]] = field(default_factory=list)
    anchor: torch.Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))

    def reset(self) -> None:
        """Free both graphs."""
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


@dataclass(frozen=True)
class Passed:
    """A state entry that the region hands through untouched, from entry `key`."""

    key: str


@dataclass(frozen=True)
class Made:
    """A state entry built from outputs (`Output` numbers), handed-through leaves and constants."""

    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]


def stage_inputs(region: Region, state: State) -> list[torch.Tensor]:
    """Copy what comes from eager code into the slot; the tensors whose gradients autograd wants, in order.

    Raises RuntimeError when an eager stage hands over another shape than at capture.
    """
    wanted: list[torch.Tensor] = []
    key: str | None = None
    leaves: list[torch.Tensor] = []
    for entry in region.inputs:
        if entry.key != key:
            key, value = entry.key, state[entry.key]
            leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
        tensor = leaves[entry.leaf]
        if entry.buffer is not None:
            if tensor.shape != entry.shape:
                raise RuntimeError(
                    f"{region.name} was captured for {entry.key!r} of shape {tuple(entry.shape)}, but the stage before "
                    f"it now made {tuple(tensor.shape)}: shapes before a captured stage must be static; leave this "
                    "stage out of the scope, or run the call under packgraph.eager(...)")
            if tensor.data_ptr() != entry.buffer.data_ptr():
                entry.buffer.copy_(tensor.detach())
        if entry.differentiable:
            wanted.append(tensor)
    return wanted


def replay_region(region: Region, state: State, ticket: Ticket, lent: dict[int, torch.Tensor]) -> State:
    """Replay the forward graph and return the next state; outputs that alias static memory are added to `lent`."""
    wanted = stage_inputs(region, state)
    if region.backward is None:
        region.forward.replay()
        made = tuple(output.static.tensor.detach() for output in region.outputs)
    else:
        ticket.pending.add(region.number)
        parameters = [parameter for parameter, _ in region.returned]
        made = _Replay.apply(region.anchor, region, ticket, *wanted, *parameters)
    for tensor in made:
        lent[id(tensor)] = tensor
    return {key: _entry(entry, state, made) for key, entry in region.entries.items()}


def _entry(entry: Passed | Made, state: State, made: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(entry, Passed):
        return state[entry.key]
    values = []
    for kind, what in entry.leaves:
        if kind == "output":
            values.append(made[what])
        elif kind == "input":
            values.append(tree_leaves(state[what[0]])[what[1]])
        else:
            values.append(what)
    return tree_unflatten(values, entry.spec)


class _Replay(torch.autograd.Function):
    """Replays a region inside the user's autograd graph.

    The anchor is a tensor that needs a gradient: without it a region whose only differentiable inputs are parameters
    it accumulates itself would have no backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, region: Region, ticket: Ticket, *inputs: torch.Tensor) -> Any:
        ctx.region, ctx.ticket = region, ticket
        ctx.set_materialize_grads(False)
        region.forward.replay()
        made = tuple(output.static.tensor.detach() for output in region.outputs)
        ctx.mark_non_differentiable(*[t for t, o in zip(made, region.outputs, strict=True) if not o.differentiable])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        region, ticket = ctx.region, ctx.ticket
        ticket.start_backward(region.number)
        _stage_gradients(region, gradients)
        GradientBuffers.attach(region.owned)
        region.backward.replay()
        results: list[torch.Tensor | None] = []
        for entry in region.inputs:
            if entry.differentiable:
                gradient = entry.gradient.tensor if entry.gradient is not None else None
                results.append(gradient if gradient is None or entry.lend else gradient.clone())
        results += [static.tensor.clone() for _, static in region.returned]
        ticket.finish_backward(region.number)
        return None, None, None, *results


def _stage_gradients(region: Region, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Put the incoming gradients where the backward graph reads them; zeros for those that did not come."""
    for number, (output, gradient) in enumerate(zip(region.outputs, gradients, strict=True)):
        if output.incoming is None:
            if gradient is not None and output.differentiable:
                raise RuntimeError(
                    f"output {number} of {region.name} gets a gradient now, but no warm-up step used it, so its "
                    "backward was not captured. Use it in the loss during warm-up too, or run calls that need it under "
                    "packgraph.eager(...)")
            continue
        target = output.incoming.tensor if hasattr(output.incoming, "tensor") else output.incoming
        if gradient is None:
            target.zero_()
        elif gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)
