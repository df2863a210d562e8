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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from packgraph.graphs import shared_gradients
from packgraph.graphs.backend import Graph, Static
from packgraph.graphs.entries import Made, Passed, make_entry
from packgraph.graphs.parameters import GradientBuffers
from packgraph.graphs.slot import Ticket
from packgraph.plan.stages import State

Token = tuple[Any, ...]


@dataclass
class Input:
    """A tensor that a region reads: leaf `leaf` of `state[key]`.

    token: names its static memory. buffer: slot memory it is copied into at every replay, or None when its pointer is
    baked (an earlier region made or received it). differentiable: autograd wants its gradient. gradient: where the
    backward graph leaves it. lend: hand the gradient out as an alias of static memory (its only reader is an earlier
    region of this slot) instead of a clone.
    """

    key: str
    leaf: int
    token: Token
    buffer: torch.Tensor | None
    differentiable: bool
    lend: bool
    gradient: Static | None = None


@dataclass(frozen=True)
class Home:
    """Where a tensor of the running call lives in static memory, as of its version then. alias: it is that memory."""

    tensor: torch.Tensor
    token: Token
    version: int
    alias: bool


class Homes:
    """The static homes of a call's tensors, by identity."""

    def __init__(self) -> None:
        self._homes: dict[int, Home] = {}

    def note(self, tensor: torch.Tensor, token: Token, alias: bool) -> None:
        """`tensor` has the contents of the static memory `token`."""
        self._homes[id(tensor)] = Home(tensor, token, tensor._version, alias)

    def token(self, tensor: torch.Tensor) -> Token | None:
        """The static memory with `tensor`'s contents, unless it was written to since."""
        home = self._homes.get(id(tensor))
        return home.token if home is not None and home.version == tensor._version else None

    def is_alias(self, tensor: Any) -> bool:
        """Whether `tensor` is static memory itself."""
        home = self._homes.get(id(tensor))
        return home is not None and home.alias

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may be a view of static memory."""
        storage = tensor.untyped_storage().data_ptr()
        return any(h.alias and h.tensor.untyped_storage().data_ptr() == storage for h in self._homes.values())


@dataclass
class Output:
    """A tensor that a region makes. incoming: where its backward graph expects the gradient, None = not captured."""

    static: Static
    differentiable: bool
    incoming: Static | None = None


@dataclass
class Region:
    """The graphs of one region in one variant.

    facts: what captured code could see of the state it was captured with. entries: per key of the result state, how
    to make its value. owned: parameters whose gradient the backward graph adds to the given buffer. returned:
    parameters whose gradient goes through autograd. summed: an output's gradient comes from several places, and
    autograd has to add them up.
    """

    number: int
    name: str
    forward: Graph
    inputs: list[Input]
    outputs: list[Output]
    facts: dict[str, tuple[TreeSpec, list[Any]]]
    entries: dict[str, Passed | Made]
    backward: Graph | None = None
    owned: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    returned: list[tuple[torch.nn.Parameter, Static]] = field(default_factory=list)
    summed: bool = False
    anchor: torch.Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))

    def reset(self) -> None:
        """Free both graphs."""
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


def shown_facts(state: State) -> dict[str, tuple[TreeSpec, list[Any]]]:
    """Everything but values that captured code can see of a state: structure, tensors' metadata, constants."""
    return {key: (spec, [_fact(leaf) for leaf in leaves])
            for key, (leaves, spec) in ((key, tree_flatten(value)) for key, value in state.items())}


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf


def accepts(region: Region, state: State, homes: Homes) -> bool:
    """Whether a state that came through eager code is what the region was captured for.

    An eager stage may do what it likes, so its results are compared in all that is baked: structure, constants, shapes,
    and the identity of tensors whose pointer is baked, be it that another entry of this state is copied there.
    """
    if shown_facts(state) != region.facts:
        return False
    copied: dict[Token, torch.Tensor] = {}
    for entry in region.inputs:
        tensor = tree_leaves(state[entry.key])[entry.leaf]
        if entry.buffer is not None:
            copied[entry.token] = tensor
        elif copied.get(entry.token) is not tensor and homes.token(tensor) != entry.token:
            return False
    return True


def stage_inputs(region: Region, state: State, homes: Homes) -> list[torch.Tensor]:
    """Copy what comes from eager code into the slot; the tensors whose gradients autograd wants, in order."""
    wanted: list[torch.Tensor] = []
    key: str | None = None
    leaves: list[torch.Tensor] = []
    for entry in region.inputs:
        if entry.key != key:
            key, value = entry.key, state[entry.key]
            leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
        tensor = leaves[entry.leaf]
        if entry.buffer is not None:
            if tensor.data_ptr() != entry.buffer.data_ptr():
                entry.buffer.copy_(tensor.detach())
            homes.note(tensor, entry.token, alias=False)
        if entry.differentiable:
            wanted.append(tensor)
    return wanted


def replay_region(region: Region, state: State, ticket: Ticket, homes: Homes) -> State:
    """Replay the forward graph and return the next state; its outputs alias static memory and are noted in `homes`."""
    with ticket.slots.launches:
        wanted = stage_inputs(region, state, homes)
        if any(output.differentiable for output in region.outputs):
            if region.backward is not None:
                ticket.pending.add(region.number)
            parameters = [parameter for parameter, _ in region.returned]
            made = _Replay.apply(region.anchor, region, ticket, *wanted, *parameters)
        else:
            region.forward.replay()
            made = tuple(output.static.tensor.detach() for output in region.outputs)
    for number, tensor in enumerate(made):
        homes.note(tensor, (region.number, number), alias=True)
    return {key: make_entry(entry, state, made) for key, entry in region.entries.items()}


class _Replay(torch.autograd.Function):
    """Replays a region inside the user's autograd graph.

    The anchor is a tensor that needs a gradient: without it a region whose only differentiable inputs are parameters
    it accumulates itself would have no backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, region: Region, ticket: Ticket, *inputs: torch.Tensor) -> Any:
        ctx.region, ctx.ticket, ctx.versions = region, ticket, _versions(region)
        ctx.set_materialize_grads(False)
        region.forward.replay()
        made = tuple(output.static.tensor.detach() for output in region.outputs)
        ctx.mark_non_differentiable(*[t for t, o in zip(made, region.outputs, strict=True) if not o.differentiable])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        region, ticket = ctx.region, ctx.ticket
        entries = [entry for entry in region.inputs if entry.differentiable]
        nothing = (None,) * (3 + len(entries) + len(region.returned))
        if all(gradient is None for gradient in gradients):
            return nothing
        _refuse_partial_backward(region)
        if ctx.versions != _versions(region):
            raise RuntimeError(f"a parameter of {region.name} was changed in place between forward and backward: the "
                               "backward graph would use its new value. Step the optimizer after the last backward")
        _check_gradients(region, gradients)
        with ticket.slots.launches as launches:
            ticket.start_backward(region.number)
            _stage_gradients(region, gradients)
            apart = shared_gradients.begin(region.owned) if launches.shared else []
            kept = [] if launches.shared else GradientBuffers.attach(region.owned)
            region.backward.replay()
            GradientBuffers.give_back(kept)
            sums = shared_gradients.taken(apart)
            results = [_handed_out(entry) for entry in entries]
            results += [static.tensor.clone() for _, static in region.returned]
            ticket.finish_backward(region.number)
        shared_gradients.add(apart, sums)
        return None, None, None, *results


def _handed_out(entry: Input) -> torch.Tensor | None:
    if entry.gradient is None:
        return None
    return entry.gradient.tensor if entry.lend else entry.gradient.tensor.clone()


def _versions(region: Region) -> int:
    """Changes whenever a parameter of the region is written to."""
    return sum(p._version for p, _ in region.owned) + sum(p._version for p, _ in region.returned)


def _refuse_partial_backward(region: Region) -> None:
    """Raise RuntimeError under autograd.grad and backward(inputs=...): they must not touch `.grad`, but graphs do."""
    if not region.owned:
        return
    node = torch.autograd.graph.get_gradient_edge(region.anchor).node
    if not torch._C._will_engine_execute_node(node):  # type: ignore[attr-defined]
        raise RuntimeError(
            "autograd.grad or backward(inputs=...) through a captured module: its graphs add the gradients of its "
            "parameters to .grad, which these calls must not do. Use loss.backward(), or run the call under "
            "packgraph.eager(...)")


def _check_gradients(region: Region, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Raise RuntimeError for a gradient that the backward graph has no place for."""
    for number, (output, gradient) in enumerate(zip(region.outputs, gradients, strict=True)):
        if output.incoming is None and gradient is not None and output.differentiable:
            raise RuntimeError(
                f"output {number} of {region.name} gets a gradient now, but no warm-up step used it, so its "
                "backward was not captured. Use it in the loss during warm-up too, or run calls that need it under "
                "packgraph.eager(...)")


def _stage_gradients(region: Region, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Put the incoming gradients where the backward graph reads them; zeros for those that did not come."""
    for output, gradient in zip(region.outputs, gradients, strict=True):
        if output.incoming is None:
            continue
        target = output.incoming.tensor
        if gradient is None:
            target.zero_()
        elif gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)
