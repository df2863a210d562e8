"""One captured region: its static tensors, and how a replay reads and writes them.

A region's forward is one graph; it has a backward graph for every pattern of gradients that its
outputs get. An autograd function (`replay.py`) ties them into the user's autograd graph. Inputs
that an earlier region of the same slot has produced are baked pointers: nothing is copied.
Everything that comes from eager code is copied into slot buffers first. Outputs are aliases of
static memory; the caller clones those that leave for eager code.

The entries of the result are handed through from the region's state, or built from its outputs.
What a region hands through keeps its place in the caller's autograd graph: nothing is copied, and
whatever reads it later is no business of the region's backward. One case is different: a
differentiable tensor that the region hands through *and* reads twice or more. Autograd sums the
gradients of a tensor in the order in which they arrive, the latest reader's first. If the region
summed its own readers by itself, the same numbers would be added in another order:

    eager        ((later + second reader) + first reader)
    by itself    later + (second reader + first reader)

Such a tensor therefore leaves the region as an output, an alias of its input (`owned_aliases`).
What is read later reaches the region's backward as the gradient of that output, and autograd adds
there in its own order. With one reader two numbers are added, which is the same both ways.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from packgraph.graphs.backend import Graph, Static
from packgraph.graphs.errors import CaptureError, forward_line
from packgraph.graphs.gradients import Attached, GradientBuffer
from packgraph.graphs.key import CallModes, pattern_of
from packgraph.graphs.output_gradients import KeyGradients, Pattern, readers_of_leaves
from packgraph.graphs.parameters import HookedParameters, ParameterEdge, is_sharded
from packgraph.graphs.stages import State


@dataclass(frozen=True)
class PassThrough:
    """A state entry that the region hands through untouched, from entry `key`.

    outputs: leaves of it (their places) that leave the region as its outputs (their numbers), with
    the same contents.
    """

    key: str
    outputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Produced:
    """A state entry built from outputs (`Output` numbers), handed-through leaves and constants."""

    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]


def owned_aliases(result: State, leaves: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """For `leaves` of a region's state that its `result` holds and that it reads twice or more: an
    alias of each.

    Returned by the leaf's identity; an alias has the leaf's memory, shape and dtype, and launches
    nothing. They must be made when the region has run: autograd goes backwards through what was
    made last first.
    """
    made = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    handed = {id(leaf) for leaf in made}
    if not any(id(leaf) in handed for leaf in leaves):
        return {}
    readers = readers_of_leaves(made)
    return {
        id(leaf): leaf.view_as(leaf)
        for leaf in leaves
        if id(leaf) in handed and readers.get(id(leaf), 0) > 1
    }


def describe_entries(
    result: State, shown: State, aliases: dict[int, torch.Tensor]
) -> tuple[dict[str, PassThrough | Produced], list[torch.Tensor]]:
    """How each entry of a region's `result` is made of its state `shown`, and the region's outputs.

    aliases: what leaves as an output although it is a leaf of `shown` (`owned_aliases`).
    """
    handed = {}
    for key, value in shown.items():
        for place, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in aliases:
                handed[id(leaf)] = (key, place)
    outputs: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number_of(leaf: torch.Tensor) -> int:
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(outputs)
            outputs.append(aliases.get(id(leaf), leaf))
        return numbers[id(leaf)]

    entries: dict[str, PassThrough | Produced] = {}
    for key, value in result.items():
        flat, spec = tree_flatten(value)
        if key in shown and value is shown[key]:
            owned = [
                (place, number_of(leaf)) for place, leaf in enumerate(flat) if id(leaf) in aliases
            ]
            entries[key] = PassThrough(key, tuple(owned))
            continue
        leaves: list[tuple[str, Any]] = []
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(("constant", leaf))
            elif id(leaf) in handed:
                leaves.append(("input", handed[id(leaf)]))
            else:
                leaves.append(("output", number_of(leaf)))
        entries[key] = Produced(spec, tuple(leaves))
    return entries, outputs


def make_entry(entry: PassThrough | Produced, state: State, made: Sequence[torch.Tensor]) -> Any:
    """The value of an entry. state: what the region was given. made: its outputs."""
    if isinstance(entry, PassThrough):
        value = state[entry.key]
        if not entry.outputs:
            return value
        leaves, spec = tree_flatten(value)
        for place, number in entry.outputs:
            leaves[place] = made[number]
        return tree_unflatten(leaves, spec)
    values = []
    for kind, what in entry.leaves:
        if kind == "output":
            values.append(made[what])
        elif kind == "input":
            values.append(tree_leaves(state[what[0]])[what[1]])
        else:
            values.append(what)
    return tree_unflatten(values, entry.spec)


Token = tuple[Any, ...]


@dataclass
class Input:
    """A tensor that a region reads: leaf `leaf` of `state[key]`.

    token: names its static memory, which is `memory`. buffer: slot memory it is copied into at
    every replay, or None when its pointer is baked (an earlier region made or received it).
    differentiable: it needs a gradient. lend: hand the gradient out as an alias of static memory
    (its only reader is an earlier region of this slot) instead of a clone.
    """

    key: str
    leaf: int
    token: Token
    memory: Static
    buffer: torch.Tensor | None
    differentiable: bool
    lend: bool


Version = tuple[
    "weakref.ref[torch.Tensor]", int
]  # a tensor with its version when it was read, or given away
Inner = tuple[
    "weakref.ref[torch.Tensor]", int
]  # an output that others were computed from, and hooks of our own on it


@dataclass
class Output:
    """A tensor that a region makes."""

    static: Static
    differentiable: bool


@dataclass
class Backward:
    """A backward graph, for one pattern of gradients.

    incoming: by output, where the graph expects the gradient. gradients: for every input of the
    region where the graph leaves the gradient, None = it has none. owned: parameters whose gradient
    the graph adds to a buffer. returned: for every returned parameter of the region where its
    gradient is, None = it has none.
    """

    graph: Graph
    incoming: dict[int, Static]
    gradients: list[Static | None]
    owned: list[GradientBuffer]
    returned: list[Static | None]

    @cached_property
    def parameters(self) -> HookedParameters:
        """The parameters whose gradient the graph adds to a buffer."""
        return HookedParameters([buffer.parameter for buffer in self.owned])

    @cached_property
    def attached(self) -> Attached:
        """Returns whether their gradients are the buffers."""
        return Attached(self.owned)

    @cached_property
    def reduces(self) -> bool:
        """Returns whether the graph sends gradients to other ranks, so that none is in a buffer
        when it ends."""
        return any(is_sharded(buffer.parameter) for buffer in self.owned)


@dataclass
class Context:
    """What surrounds a captured region: what it reads and writes from outside, and how to run it
    without graphs.

    reads: tensors whose values it uses, those that backwards read first. read_later: those that
    backwards read. addresses: of their memory at capture. writes: tensors that its forward writes
    to. counted: those whose versions count that, which the running averages of a batch norm do not.
    generators: those whose numbers it draws. run: its stages, eagerly, within `calls`, since
    another thread may capture the module. inputs: numbers of the inputs that backwards read.
    changed: whether facts that the graphs have baked about the module hold no longer. gradients:
    what is known of the gradients that its outputs get. asks_later: Python code of others runs in
    backwards, and reads what it may then.
    """

    run: Callable[[State], State]
    changed: Callable[[], object]
    calls: AbstractContextManager[object]
    gradients: KeyGradients
    reads: list[torch.Tensor] = field(default_factory=list)
    read_later: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    counted: list[torch.Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    asks_later: bool = False


@dataclass
class Region:
    """The graphs of one region in one variant.

    facts: what captured code could see of the state it was captured with. entries: per key of the
    result state, how to make its value. parameters: those that only this region differentiates:
    their gradients are added to buffers. returned: other parameters, whose gradients go through
    autograd. settings: of torch, by which kernels compute, at capture. modes: of the call. inner:
    numbers of the outputs that other outputs were computed from. saved: numbers of those that
    backwards read. summed: an output's gradient comes from several places, and autograd has to add
    them up.
    """

    number: int
    name: str
    forward: Graph
    inputs: list[Input]
    outputs: list[Output]
    facts: dict[str, tuple[TreeSpec, list[Any]]]
    entries: dict[str, PassThrough | Produced]
    context: Context
    parameters: ParameterEdge
    settings: tuple[Any, ...]
    modes: CallModes
    returned: list[torch.nn.Parameter] = field(default_factory=list)
    backwards: dict[Pattern, Backward] = field(default_factory=dict)
    summed: bool = False
    inner: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    @property
    def backward(self) -> Backward | None:
        """The only backward, None if there is none, or several."""
        return next(iter(self.backwards.values())) if len(self.backwards) == 1 else None

    def incoming(self, number: int) -> Static | None:
        """Where the first backward expects the gradient of an output."""
        return next(
            (b.incoming[number] for b in self.backwards.values() if number in b.incoming), None
        )

    def added_to(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.nn.Parameter]:
        """In a backward: parameters to whose `.grad` a replay for these gradients of the outputs
        adds (others may come by way of autograd)."""
        casts = torch.is_autocast_enabled(self.modes.device_type)
        backward = None if casts else self.backwards.get(pattern_of(gradients))
        return [] if backward is None else [buffer.parameter for buffer in backward.owned]

    @cached_property
    def is_differentiable(self) -> bool:
        """Returns whether any output needs a gradient."""
        return any(output.differentiable for output in self.outputs)

    def reset(self) -> None:
        """Free all graphs."""
        self.forward.reset()
        for backward in self.backwards.values():
            backward.graph.reset()


@dataclass(frozen=True)
class Owned:
    """A static tensor in a slot buffer, in the form of `Static`."""

    tensor: torch.Tensor


def shown_facts(state: State) -> dict[str, tuple[TreeSpec, list[Any]]]:
    """Everything but values that captured code can see of a state: structure, tensors' metadata,
    constants."""
    return {
        key: (spec, [_fact(leaf) for leaf in leaves])
        for key, (leaves, spec) in ((key, tree_flatten(value)) for key, value in state.items())
    }


def check_first(
    regions: Mapping[int, Region], program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises CaptureError where a call of a program begins with another state than at capture.
    Whether tensors need gradients is the caller's business here."""
    now, then = shown_facts(program.begin(args, kwargs)), next(iter(regions.values())).facts
    if _without_gradients(now) != _without_gradients(then):
        raise CaptureError(
            f"begin of {type(program.module).__name__} makes another state than at capture for "
            "such calls",
            forward_line(program.module),
            "pass what changes to the call as an argument",
        )


def _without_gradients(facts: dict[str, tuple[TreeSpec, list[Any]]]) -> dict[str, Any]:
    return {key: (spec, [leaf[:3] for leaf in leaves]) for key, (spec, leaves) in facts.items()}


def _fact(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf
