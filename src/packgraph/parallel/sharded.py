"""Sharded layers: parameters and gradients that are whole only while a layer runs (ZeRO stages 2
and 3, Rajbhandari et al. 2020, arXiv:1910.02054).

Every rank keeps its own part of a layer's matrices, of their gradients and of the optimizer's
state. The whole ones lie in one of two buffers, with which layers take turns, so addresses are
static and captured graphs may hold them:

    layer       0      1      2      3           forward, from left to right
    buffer      A      B      A      B
                gather ▸ run ▸ leave             backward, from right to left
                reduce ◂ run ◂ gather, zero

Two stages stand around those of a layer. `enter` gathers the parameters, and its node of autograd
reduces the gradients in the backward: each rank adds its part of the sum over all ranks to what it
keeps. `leave` does nothing in the forward; its node gathers the parameters again and zeroes the
buffer of gradients. The nodes are identities, so all numbers are those without them. They are
stages as others: a scope captures them into graphs, recomputation begins behind `enter`.

Why the order of autograd is the right one. Every differentiable tensor that gets into a layer goes
through the node of `enter`, every one that gets out through that of `leave`. So all gradients of
the layer come by way of `leave`, which runs first. Autograd runs ready nodes by the order in which
they were made, latest first. Take a node of the layer that has not run when that of `enter` is the
next: some node behind which it waits is ready, that one was made still later, and would be next
itself. So no node of the layer is left, and the accumulators of its parameters, which come before
all others, have run, too. (One device has one such queue, and so has a captured backward.) The node
of `enter` is in front of all nodes of the layer before, so buffers are free when they are needed.

A layer into which nothing differentiable gets has no node of `enter`, and no layer before it has a
backward. Its gradients are reduced when the backward ends, or when it gets to another call's.

Gradients of several microbatches are added up in the parts. So a sum over ranks is rounded before
the sum over microbatches; with one microbatch a rank, and two ranks, the bits are those of replicas
that are not sharded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from packgraph.graphs.gradients import add_waiting_gradients
from packgraph.graphs.parameters import mark_sharded
from packgraph.graphs.stages import Stage, State
from packgraph.ops.collectives import all_gather_flat, reduce_scatter_flat
from packgraph.parallel.data import FlatParameters, GradientBucket

ENTER, LEAVE = "shard_gather", "shard_leave"
_LATE = "shard_reduces_late"  # entry of the state within a layer
_open: dict[int, "ShardedLayer"] = {}  # layers without `enter`, by the number of their backward


def layers_of(model: nn.Module) -> dict[str, int]:
    """The number of the layer by the name of each parameter that is a matrix of that layer alone.

    Layers are the entries of `model.layers` (a ModuleDict by their numbers).
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleDict):
        return {}
    found: dict[int, set[int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, rest = name.partition(".")
        layer = int(rest.partition(".")[0]) if owner == "layers" else None
        found.setdefault(id(parameter), set()).add(layer)
    return {
        name: layer
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2
        and len(users := found[id(parameter)]) == 1
        and (layer := next(iter(users))) is not None
    }


class ShardedLayer:
    """One layer: its spans, and the stages around its own.

    Nothing of it changes while layers run, so captured code may use it.
    """

    def __init__(self, number: int, spans: Sequence[GradientBucket]) -> None:
        self.number, self.spans = number, list(spans)
        for span in spans:
            for member in span.members:
                mark_sharded(member.parameter)

    def around(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages of the layer between those that shard it."""
        return [
            Stage(ENTER, self.number, self.enter),
            *stages,
            Stage(LEAVE, self.number, self.leave),
        ]

    def enter(self, state: State) -> State:
        """Stage `shard_gather`: the layer's parameters become whole."""
        self.gather()
        state, has_node = _through(_Enter, (self,), state)
        return {**state, _LATE: not has_node}

    def leave(self, state: State) -> State:
        """Stage `shard_leave`: what follows may use the buffers."""
        late = state[_LATE]
        rest = {key: value for key, value in state.items() if key != _LATE}
        return _through(_Leave, (self, late), rest)[0]

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters whole, where they are sharded."""
        for span in self.spans:
            if span.is_gathered:
                all_gather_flat(span.parameters, span.own_parameters, group=span.group)

    @torch.no_grad()
    def begin_backward(self, late: bool) -> None:
        """Make the parameters whole again and the gradients zero. late: there is no node that will
        reduce them. Raises RuntimeError where a `.grad` is not what this layer has given."""
        _end_late()  # of another call in the same backward
        if late:
            _open[torch._C._current_graph_task_id()] = self
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(_end_late)
        self.gather()
        for span in self.spans:
            for member in span.members:
                if member.parameter.grad is None:
                    member.parameter.grad = member.gradient
                elif member.parameter.grad is not member.gradient:
                    raise RuntimeError(
                        f"the gradient of {member.name} was replaced, but it is sharded: ranks add "
                        "up what comes to its own memory only. Leave .grad alone, or set it to None"
                    )
            # Not as a write that counts: backwards in flight do not depend on what is there now.
            span.gradients.data.zero_()

    @torch.no_grad()
    def reduce(self) -> None:
        """Add this rank's part of the sum of all ranks' gradients to what it keeps."""
        add_waiting_gradients()
        for span in self.spans:
            part = torch.empty_like(span.own_gradients)
            reduce_scatter_flat(part, span.gradients, group=span.group)
            span.own_gradients.data.add_(part)


class ShardedLayers:
    """The sharded layers of a model, by their numbers."""

    def __init__(self, flat: FlatParameters) -> None:
        spans: dict[int, list[GradientBucket]] = {}
        for span in flat.spans:
            if span.sharded_layer is not None:
                spans.setdefault(span.sharded_layer, []).append(span)
        self.layers: Mapping[int, ShardedLayer] = {
            number: ShardedLayer(number, found) for number, found in sorted(spans.items())
        }

    def around(self, number: int, stages: Sequence[Stage]) -> list[Stage]:
        """The stages of a layer, between those that shard it if it is."""
        layer = self.layers.get(number)
        return list(stages) if layer is None else layer.around(stages)


def _through(function: Any, arguments: tuple[Any, ...], state: State) -> tuple[State, bool]:
    """The state, its differentiable tensors through one node of autograd; whether there is one.

    A tensor in several places stays one. Entries without such tensors stay the objects they are.
    """
    found = {
        id(leaf): leaf
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if not found or not torch.is_grad_enabled():
        return state, False
    made = dict(zip(found, function.apply(*arguments, *found.values()), strict=True))
    passed = {
        key: tree_map(lambda leaf: made.get(id(leaf), leaf), value)
        if any(id(leaf) in made for leaf in tree_leaves(value))
        else value
        for key, value in state.items()
    }
    return passed, True


class _Enter(torch.autograd.Function):
    """The node in front of a layer's."""

    @staticmethod
    def forward(ctx: Any, layer: ShardedLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.layer.reduce()
        return None, *gradients


class _Leave(torch.autograd.Function):
    """The node behind a layer's. late: there is no node in front."""

    @staticmethod
    def forward(ctx: Any, layer: ShardedLayer, late: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.late = layer, late
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.layer.begin_backward(ctx.late)
        return None, None, *gradients


def _end_late() -> None:
    """Within a backward or at its end: reduce the gradients of its layer without `enter`."""
    layer = _open.pop(torch._C._current_graph_task_id(), None)
    if layer is not None:
        layer.reduce()
