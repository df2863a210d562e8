"""Building one variant: forward of every region in order, then backward in reverse, into one slot's pool.

    F0 .. F1 .. F2 | B2 B1 B0        `..` = an eager stage, run on real data to give the next region its inputs

What is held while capturing decides which memory may be reused: outputs of a region are held until its own backward
is captured, gradients until the region that reads them is. Nothing of the user's state changes: parameters are
aliased, writes are journalled and undone, random generators are put back.
"""
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from packgraph.graphs.accumulate import Accumulator
from packgraph.graphs.autograd_walk import leaves_behind
from packgraph.graphs.backend import Graph, Static, Window
from packgraph.graphs.constants import Constants
from packgraph.graphs.direct import Direct, direct_replay
from packgraph.graphs.entries import Made, Passed, describe_entries, make_entry, owned_aliases
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.guard import LEAVE_OUT, Journal, Watch
from packgraph.graphs.parameters import Aliases, GradientBuffers, has_hooks, static_gradient
from packgraph.graphs.program import Program, hide_lengths
from packgraph.graphs.region import Input, Output, Region, shown_facts
from packgraph.graphs.slot import Slot
from packgraph.plan.regions import Run
from packgraph.plan.stages import State


@dataclass(frozen=True)
class Owned:
    """A static tensor in a slot buffer, in the form of `Static`."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class _Origin:
    """Where a tensor of the build's state lives: slot buffer `number` (producer None), or an output of a region."""

    tensor: torch.Tensor
    producer: int | None = None
    number: int = 0


@dataclass
class _Forward:
    """A captured forward and the live tensors its backward needs."""

    run: Run
    graph: Graph
    inputs: list[Input]
    facts: dict[str, Any]
    leaves: list[torch.Tensor]
    origins: list[_Origin]
    outputs: list[torch.Tensor]
    statics: list[Static]
    entries: dict[str, Passed | Made]
    parameters: list[torch.nn.Parameter]


@dataclass
class Variant:
    """The regions of one key in one slot, by the index of their run.

    ends: for each of the call's outputs the region and output number it comes from, None for eager code's. direct: how
    to replay all regions without autograd, where that can be.
    """

    regions: dict[int, Region]
    ends: list[tuple[int, int] | None]
    direct: Direct | None

    def reset(self) -> None:
        """Free all graphs."""
        for region in self.regions.values():
            region.reset()


class VariantBuild:
    """One build. observed: by how many outputs a call has, the numbers of those that got gradients in warm-up.

    lends: gradients of the call's inputs are handed out as static memory. written: tensors from outside that
    captured forwards write to, as far as the window does not see that itself. constants: those of the rehearsal.
    """

    def __init__(self, program: Program, slot: Slot, window: Window, aliases: Aliases, buffers: GradientBuffers,
                 observed: dict[int, set[int]], journal: Journal, lends: bool,
                 written: Sequence[torch.Tensor], constants: Constants) -> None:
        self.program, self.slot, self.window, self.aliases = program, slot, window, aliases
        self.buffers, self.observed, self.journal = buffers, observed, journal
        self.lends, self.written, self.constants = lends, written, constants
        self.origins: dict[int, _Origin] = {}
        self.alive: list[torch.Tensor] = []
        self.made: dict[int, list[torch.Tensor]] = {}
        self.forwards: dict[int, _Forward] = {}
        self.exposed: set[tuple[int, int]] = set()
        self.used_eagerly: set[int] = set()
        self.arriving: dict[tuple[int, int], list[tuple[torch.Tensor, Static]]] = defaultdict(list)
        self.lent: list[torch.Tensor] = []

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Capture all regions for a call with these arguments."""
        self.constants.start_over()
        first = self.program.begin(args, kwargs)
        numbers = numbers_of_tensors(args, kwargs)
        state = detached_state(first, numbers)
        pairs = zip(tree_leaves(first), tree_leaves(state), strict=True)
        given = {id(own): numbers[id(leaf)] for leaf, own in pairs if id(leaf) in numbers}
        captured = [run.captured for run in self.program.runs]
        if True in captured and False in captured[captured.index(True):]:  # what is captured runs for what is not
            for memory in self.written:
                self.journal.before_write(memory)
        for index, run in enumerate(self.program.runs):
            state = self._capture_forward(index, run, state) if run.captured else self._run_eagerly(run, state)
        ends = []
        result = self.program.end(state)
        check_outputs(result)
        leaves = tree_leaves(result)
        observed = self.observed.get(len(leaves))
        for number, leaf in enumerate(leaves):
            origin = self.origins.get(id(leaf))
            ends.append((origin.producer, origin.number) if origin and origin.producer is not None else None)
            if not observed or number in observed:
                self._expose(leaf)
        # `leaves` stay: the outputs may be handed out as static memory and be read when the last backward has run.
        del result
        state = {}
        backwards = {index: self._capture_backward(index) for index in reversed(self.forwards)}
        self.lent = []
        regions = dict(reversed(backwards.items()))
        taken_in = [given.get(id(tensor)) for tensor in self.alive]
        return Variant(regions, ends, direct_replay(regions, len(self.program.runs), ends, taken_in))

    def _expose(self, leaf: Any) -> None:
        origin = self.origins.get(id(leaf))
        if origin is not None and origin.producer is not None and leaf.requires_grad:
            self.exposed.add((origin.producer, origin.number))

    def _run_eagerly(self, run: Run, state: State) -> State:
        """Run uncoloured stages on real data, for which captured forwards run once; note which captured tensors and
        parameters they differentiate."""
        self.window.materialise()
        with torch.enable_grad(), Watch(self.journal, refuse=False, device=None):
            result = self.program.run(run, state)
        for leaf in leaves_behind(tree_leaves(result)):
            if id(leaf) in self.aliases.parameter_of:
                self.used_eagerly.add(id(leaf))
            self._expose(leaf)
        return self._cut(result, state)

    def _cut(self, result: State, before: State) -> State:
        """Detach what an eager stage made; what it handed through keeps its identity."""
        return detached_state(result, {id(t) for t in tree_leaves(result)}, {id(t) for t in tree_leaves(before)})

    def _capture_forward(self, index: int, run: Run, state: State) -> State:
        shown, inputs, leaves, origins = self._static_inputs(state)
        facts = shown_facts(hide_lengths(state))
        versions = [leaf._version for leaf in leaves]
        torch.clear_autocast_cache()
        with torch.enable_grad():
            graph, (result, aliases) = self.window.capture(lambda: self._run_captured(run, shown, leaves))
        refuse_changed_inputs(versions, leaves, self.program.describe(run))
        entries, outputs = describe_entries(result, shown, aliases)
        parameters = self._parameters_of(outputs)
        statics = [self.window.static(out) for out in outputs]
        self.forwards[index] = _Forward(run, graph, inputs, facts, leaves, origins, outputs, statics, entries,
                                        parameters)
        made = self.made[index] = [_leaf(out) for out in outputs]
        for number, tensor in enumerate(made):
            self.origins[id(tensor)] = _Origin(tensor, index, number)
        return {key: make_entry(entry, state, made) for key, entry in entries.items()}

    def _run_captured(self, run: Run, shown: State, leaves: list[torch.Tensor]
                      ) -> tuple[State, dict[int, torch.Tensor]]:
        """What a forward graph holds."""
        with self.constants.handing_out():
            result = self.program.run(run, shown)
        return result, owned_aliases(result, leaves)

    def _static_inputs(self, state: State) -> tuple[State, list[Input], list[torch.Tensor], list[_Origin]]:
        """The state as the region sees it: static tensors, cut from everything before."""
        inputs: list[Input] = []
        leaves: list[torch.Tensor] = []
        origins: list[_Origin] = []
        leaf_of: dict[int, torch.Tensor] = {}
        shown: State = {}
        for key, value in hide_lengths(state).items():
            flat, spec = tree_flatten(value)
            for position, tensor in enumerate(flat):
                if not isinstance(tensor, torch.Tensor):
                    continue
                origin, buffer = self._place(tensor)
                if id(tensor) not in leaf_of:  # one leaf for all its places: autograd sums all of its readers
                    leaf_of[id(tensor)] = origin.tensor.detach().requires_grad_(tensor.requires_grad)
                flat[position] = leaf_of[id(tensor)]
                leaves.append(leaf_of[id(tensor)])
                origins.append(origin)
                token = ("slot" if origin.producer is None else origin.producer, origin.number)
                inputs.append(Input(key, position, token, buffer, tensor.requires_grad,
                                    lend=self.lends or origin.producer is not None))
            shown[key] = tree_unflatten(flat, spec)
        return shown, inputs, leaves, origins

    def _place(self, tensor: torch.Tensor) -> tuple[_Origin, torch.Tensor | None]:
        """The static home of `tensor`, and the slot buffer if a replay must copy into it."""
        if id(tensor) in self.origins:
            return self.origins[id(tensor)], None
        buffer = self.slot.buffer(("input", len(self.alive)), tensor)
        buffer.copy_(tensor.detach())
        self.origins[id(tensor)] = _Origin(buffer, None, len(self.alive))
        self.alive.append(tensor)
        return self.origins[id(tensor)], buffer

    def _parameters_of(self, outputs: list[torch.Tensor]) -> list[Any]:
        """The aliases that outputs of a region depend on. Other leaves are inputs, or made by the region itself: the
        rehearsal has refused those from elsewhere."""
        return [leaf for leaf in leaves_behind(outputs) if id(leaf) in self.aliases.parameter_of]

    def _capture_backward(self, index: int) -> Region:
        forward = self.forwards[index]
        pairs = zip(forward.statics, forward.outputs, strict=True)
        outputs = [Output(static, out.requires_grad) for static, out in pairs]
        name = self.program.describe(forward.run)
        region = Region(index, name, forward.graph, forward.inputs, outputs, forward.facts, forward.entries)
        starts, gradients = self._incoming(index, forward, outputs, region)
        if starts:
            owned, returned = self._classify(forward.parameters)
            leaves = list({id(leaf): leaf for leaf in forward.leaves if leaf.requires_grad}.values())
            region.owned = [(self.aliases.parameter_of[id(a)], self._own(a)) for a in owned]
            wanted = [*leaves, *owned, *returned]
            # Autocast ends with the forward: its own operations know what they were cast to.
            with torch.autocast(self.slot.device.type, enabled=False):
                landings = self._landings(forward)
                region.backward, _ = self.window.capture(
                    lambda: _backward(starts, gradients, wanted, owned, landings), brief=True)
            self._collect(forward, region, owned, returned, landings)
        for entry in region.inputs:
            entry.differentiable = entry.gradient is not None
        self.arriving = defaultdict(list, {k: v for k, v in self.arriving.items() if k[0] != index})
        self.origins = {key: origin for key, origin in self.origins.items() if origin.producer != index}
        self.made[index], forward.outputs, forward.leaves, forward.origins, forward.statics = [], [], [], [], []
        return region

    def _incoming(self, index: int, forward: _Forward, outputs: list[Output], region: Region
                  ) -> tuple[list[Any], list[Any]]:
        """The outputs that get gradients, and where those arrive."""
        starts, gradients = [], []
        for number, output in enumerate(outputs):
            later = self.arriving[(index, number)]
            if not output.differentiable or not (later or (index, number) in self.exposed):
                continue
            region.summed = region.summed or len(later) + ((index, number) in self.exposed) > 1
            if later:
                gradient, output.incoming = later[0]
            else:
                gradient = self.slot.buffer(("gradient", index, number), forward.outputs[number])
                output.incoming = Owned(gradient)
            starts.append(forward.outputs[number])
            gradients.append(gradient)
        return starts, gradients

    def _classify(self, aliases: list[Any]) -> tuple[list[Any], list[Any]]:
        """Which parameters the backward graph accumulates itself, and which return their gradient through autograd."""
        users: dict[int, int] = defaultdict(int)
        for forward in self.forwards.values():
            for alias in forward.parameters:
                users[id(alias)] += 1
        owned = [a for a in aliases if users[id(a)] == 1 and id(a) not in self.used_eagerly
                 and not has_hooks(self.aliases.parameter_of[id(a)])]
        taken = {id(a) for a in owned}
        return owned, [a for a in aliases if id(a) not in taken]

    def _own(self, alias: torch.nn.Parameter) -> torch.Tensor:
        buffer = self.buffers.buffer(self.aliases.parameter_of[id(alias)])
        alias.grad = buffer
        return buffer

    def _landings(self, forward: _Forward) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs whose gradient is read later than right after the replay, with memory of the slot that takes it in."""
        read_later = {id(leaf): leaf for entry, leaf in zip(forward.inputs, forward.leaves, strict=True)
                      if leaf.requires_grad and entry.lend}
        return [(leaf, self.window.allocate(leaf.detach())) for leaf in read_later.values()]

    def _collect(self, forward: _Forward, region: Region, owned: list[Any], returned: list[Any],
                 landings: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the gradients that the backward left on its leaves."""
        landing_of = {id(leaf): landing for leaf, landing in landings}
        for alias in owned:
            alias.grad = None
        for alias in returned:
            if alias.grad is not None:
                region.returned.append((self.aliases.parameter_of[id(alias)], static_gradient(self.window, alias.grad)))
                alias.grad = None
        for entry, leaf, origin in zip(forward.inputs, forward.leaves, forward.origins, strict=True):
            if leaf.grad is None:
                continue
            gradient = landing_of.get(id(leaf), leaf.grad)
            entry.gradient = self.window.static(gradient)
            if origin.producer is not None:
                self.arriving[(origin.producer, origin.number)].append((gradient, entry.gradient))
            elif entry.lend:  # read when the last backward has run: none of those to come may take its memory
                self.lent.append(gradient)
            leaf.grad = None


def refuse_changed_inputs(versions: list[int], inputs: list[torch.Tensor], name: str) -> None:
    """Raise CaptureError when captured code, called `name`, has written to one of its inputs. versions: before."""
    if versions != [leaf._version for leaf in inputs]:
        raise CaptureError(f"{name} changes one of its inputs in place", user_line(),
                           "write to a new tensor: the caller's tensor would not change when the graph is replayed")


def numbers_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, int]:
    """For the call's tensors, by identity, their numbers.

    A tensor that the call has twice is left out: which of the two places is meant cannot be told, and the next call may
    well have different tensors there.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    times = Counter(map(id, tensors))
    return {id(tensor): number for number, tensor in enumerate(tensors) if times[id(tensor)] == 1}


def _backward(starts: list[Any], gradients: list[Any], wanted: list[Any], owned: list[Any],
              landings: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What a backward graph holds."""
    accumulator = Accumulator(owned)
    try:
        accumulator.begin()
        torch.autograd.backward(starts, gradients, inputs=wanted)
        accumulator.end()
    finally:
        accumulator.drop()
    with torch.no_grad():
        for leaf, landing in landings:
            if leaf.grad is not None:
                landing.copy_(leaf.grad)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, cut from what made it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def detached_state(state: State, single: Container[int] = (), keep: Container[int] = ()) -> State:
    """The state cut from the caller's autograd graph; tensors of `keep` (identities) are left as they are.

    A differentiable tensor of `single` that occurs twice stays one, so that its gradients are summed in eager's order.
    Any other becomes two: the next call with this key may well pass two different ones.
    """
    cut: dict[int, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in keep:
            return leaf
        if leaf.requires_grad and id(leaf) in single:
            return cut.setdefault(id(leaf), _leaf(leaf))
        return _leaf(leaf)

    return tree_map(own, state)


def check_outputs(result: Any) -> None:
    """Raise CaptureError when a call's outputs hold something a replay could not make again."""
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor | int | float | str | bool | None):
            remedy = "return tensors in tuples, lists or dicts. " + LEAVE_OUT
            if hasattr(leaf, "get_seq_length"):  # what language models call a cache of keys and values
                remedy = "it is a cache for generation, which training does not need: model.config.use_cache = False"
            raise CaptureError(f"the module returns a {type(leaf).__name__}, which a graph cannot make", user_line(),
                               remedy)
