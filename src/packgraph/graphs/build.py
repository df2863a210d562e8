"""Building one variant: forward of every region in order, then backward in reverse, into one slot's
pool.

    F0 .. F1 .. F2 | B2 B1 B0        `..` = an eager stage, run on real data to give the next region
                                     its inputs

What is held while capturing decides which memory may be reused: outputs of a region are held until
its own backward is captured, gradients until the region that reads them is. Nothing of the user's
state changes: parameters are aliased, writes are journalled and undone, random generators are put
back.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from packgraph.graphs.backend import (
    Graph,
    Static,
    Window,
    range_name,
    sizes_in_short,
)
from packgraph.graphs.checks.calls import DryRun, Place, Uses
from packgraph.graphs.checks.host_sync import LEAVE_OUT, CaptureChecker, Journal
from packgraph.graphs.checks.unsupported import refuse_shared_memory
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.gradients import GradientBuffers, adding_together
from packgraph.graphs.key import CallModes, Layout, kernel_settings, layout_of
from packgraph.graphs.output_gradients import (
    KeyGradients,
    Pattern,
    leaves_behind,
    readers_of_results,
    runs_python,
    summed_gradients,
)
from packgraph.graphs.parameters import (
    Aliases,
    ParameterEdge,
    has_hooks,
    is_gathered,
    is_sharded,
    local_tensor,
    static_gradient,
    storage_of,
)
from packgraph.graphs.program import (
    Program,
    cut_off,
    detached_state,
    hide_lengths,
    numbers_of_tensors,
)
from packgraph.graphs.region import (
    Backward,
    Context,
    Input,
    Output,
    Owned,
    PassThrough,
    Produced,
    Region,
    describe_entries,
    make_entry,
    owned_aliases,
    shown_facts,
)
from packgraph.graphs.replay import Variant, direct_replay
from packgraph.graphs.slots import Slot
from packgraph.graphs.stages import Run, State
from packgraph.torch_internals import version_of


@dataclass(frozen=True)
class _Origin:
    """Location of a tensor of the build's state: slot buffer `number` (producer None), or an output
    of a region."""

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
    entries: dict[str, PassThrough | Produced]
    parameters: list[torch.nn.Parameter]
    uses: Uses


class VariantBuild:
    """One build. gradients: what is known of gradients of calls like this one. changed: whether
    facts about the module hold no longer that graphs bake.

    calls: entered around eager runs of the module. lends: gradients of the call's inputs are handed
    out as static memory. dry_run: of the same call.
    """

    def __init__(
        self,
        program: Program,
        slot: Slot,
        window: Window,
        aliases: Aliases,
        buffers: GradientBuffers,
        gradients: KeyGradients,
        changed: Callable[[], object],
        calls: AbstractContextManager[object],
        journal: Journal,
        lends: bool,
        dry_run: DryRun,
    ) -> None:
        self.program, self.slot, self.window, self.aliases = (
            program,
            slot,
            window,
            aliases,
        )
        self.buffers, self.gradients, self.changed, self.calls = buffers, gradients, changed, calls
        self.journal = journal
        self.lends, self.dry_run = lends, dry_run
        self.storages: set[int] = set()  # made while capturing
        self.origins: dict[int, _Origin] = {}
        self.alive: list[torch.Tensor] = []
        self.made: dict[int, list[torch.Tensor]] = {}
        self.forwards: dict[int, _Forward] = {}
        self.exposed: dict[tuple[int, int], Layout | None] = {}
        self.used_eagerly: set[int] = set()
        self.last_use: dict[int, int] = {}  # number of the run, by identity of the alias
        self.arriving: dict[tuple[int, int], list[tuple[int, torch.Tensor, Static]]] = defaultdict(
            list
        )
        self.lent: list[torch.Tensor] = []
        self.sizes = ""  # of the call, for profiles

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Capture all regions for a call with these arguments."""
        self.dry_run.constants.start_over()
        self.sizes = sizes_in_short((args, kwargs))
        first = self.program.begin(args, kwargs)
        numbers = numbers_of_tensors(args, kwargs)
        state = detached_state(first, numbers)
        pairs = zip(tree_leaves(first), tree_leaves(state), strict=True)
        given = {id(own): numbers[id(leaf)] for leaf, own in pairs if id(leaf) in numbers}
        captured = [run.captured for run in self.program.runs]
        if (
            True in captured and False in captured[captured.index(True) :]
        ):  # what is captured runs for what is not
            for memory in self.dry_run.written:
                self.journal.before_write(memory)
        state = self.program.execute(state, self)
        ends = []
        result = self.program.end(state)
        check_outputs(result)
        leaves = tree_leaves(result)
        if not self.lends:
            made = {key for key, origin in self.origins.items() if origin.producer is not None}
            refuse_shared_memory(leaves, self.storages, made)
        expected = self.gradients.expected(leaves)
        for number, leaf in enumerate(leaves):
            origin = self.origins.get(id(leaf))
            ends.append(
                (origin.producer, origin.number) if origin and origin.producer is not None else None
            )
            if number in expected:
                self._expose(leaf, expected[number])
        # `leaves` stay: the outputs may be handed out as static memory and be read when the last
        # backward has run.
        del result
        state = {}
        backwards = {index: self._capture_backward(index) for index in reversed(self.forwards)}
        self.lent = []
        regions = dict(reversed(backwards.items()))
        taken_in = [given.get(id(tensor)) for tensor in self.alive]
        direct = direct_replay(regions, len(self.program.runs), ends, taken_in)
        return Variant(regions, ends, direct, self.gradients, self.gradients.version, self.dry_run)

    def _expose(self, leaf: Any, layout: Layout | None = None) -> None:
        """Expect a gradient for `leaf` from outside of regions. layout: of the gradient, None =
        that of `leaf`."""
        origin = self.origins.get(id(leaf))
        if origin is not None and origin.producer is not None and leaf.requires_grad:
            self.exposed.setdefault((origin.producer, origin.number), layout)

    def eager(self, index: int, run: Run, state: State) -> State:
        """Run uncoloured stages on real data, for which captured forwards run once; note which
        captured tensors and parameters they differentiate."""
        self.window.materialise()
        with CaptureChecker(self.journal, refuse=False, device=None):
            result = self.program.run(run, state)
        for leaf in leaves_behind(tree_leaves(result)):
            if id(leaf) in self.aliases.parameter_of:
                self.used_eagerly.add(id(leaf))
                self.last_use[id(leaf)] = index
            self._expose(leaf)
        # What it made is detached; what it handed through keeps its identity.
        made, given = tree_leaves(result), tree_leaves(state)
        return detached_state(result, {id(leaf) for leaf in made}, {id(leaf) for leaf in given})

    def captured(self, index: int, run: Run, state: State) -> State:
        """Capture the forward of a run."""
        shown, inputs, leaves, origins = self._static_inputs(state)
        facts = shown_facts(hide_lengths(state))
        versions = [version_of(leaf) for leaf in leaves]
        torch.clear_autocast_cache()
        uses = Uses(self.storages)
        graph, (result, aliases) = self.window.capture(
            lambda: self._run_captured(run, shown, leaves, uses)
        )
        graph.name = self._range(run, "forward")
        refuse_changed_inputs(versions, leaves, self.program.describe(run))
        entries, outputs = describe_entries(result, shown, aliases)
        # Other leaves are inputs, or made by the region itself: the dry run has refused the rest.
        known = self.aliases.parameter_of
        parameters: list[Any] = [leaf for leaf in leaves_behind(outputs) if id(leaf) in known]
        self.last_use |= dict.fromkeys(map(id, parameters), index)
        statics = [self.window.static(out) for out in outputs]
        self.forwards[index] = _Forward(
            run, graph, inputs, facts, leaves, origins, outputs, statics, entries, parameters, uses
        )
        made = self.made[index] = [cut_off(out) for out in outputs]
        for number, tensor in enumerate(made):
            self.origins[id(tensor)] = _Origin(tensor, index, number)
        return {key: make_entry(entry, state, made) for key, entry in entries.items()}

    def _range(self, run: Run, what: str) -> str:
        return range_name(self.program.label(run), what, f"slot {self.slot.index}", self.sizes)

    def _run_captured(
        self, run: Run, shown: State, leaves: list[torch.Tensor], uses: Uses
    ) -> tuple[State, dict[int, torch.Tensor]]:
        """Runs the code that a forward graph captures."""
        with uses, self.dry_run.constants.handing_out():
            result = self.program.run(run, shown)
            return result, owned_aliases(result, leaves)

    def _static_inputs(
        self, state: State
    ) -> tuple[State, list[Input], list[torch.Tensor], list[_Origin]]:
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
                if (
                    id(tensor) not in leaf_of
                ):  # one leaf for all its places: autograd sums all of its readers
                    leaf_of[id(tensor)] = origin.tensor.detach().requires_grad_(
                        tensor.requires_grad
                    )
                flat[position] = leaf_of[id(tensor)]
                leaves.append(leaf_of[id(tensor)])
                origins.append(origin)
                token = ("slot" if origin.producer is None else origin.producer, origin.number)
                memory = (
                    Owned(origin.tensor)
                    if origin.producer is None
                    else self.forwards[origin.producer].statics[origin.number]
                )
                inputs.append(
                    Input(
                        key,
                        position,
                        token,
                        memory,
                        buffer,
                        tensor.requires_grad,
                        lend=self.lends or origin.producer is not None,
                    )
                )
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

    def _capture_backward(self, index: int) -> Region:
        forward = self.forwards[index]
        outputs = [
            Output(static, out.requires_grad)
            for static, out in zip(forward.statics, forward.outputs, strict=True)
        ]
        users, original = self._users(), self.aliases.parameter_of
        owned, returned = list[Any](), list[Any]()
        for alias in forward.parameters:
            alone = users[id(alias)] == 1 and not has_hooks(original[id(alias)])
            (owned if alone else returned).append(alias)
        later = [alias for alias in returned if self.last_use[id(alias)] > index]
        name = self.program.describe(forward.run)
        _refuse_sums(name, forward.outputs, returned, later, users)
        made = {number: out for number, out in enumerate(forward.outputs) if out.requires_grad}
        readers = readers_of_results(list(made.values()))
        patterns, summed = self._patterns(index, forward)
        backwards: dict[Pattern, Backward] = {}
        later_reads: dict[Place, torch.Tensor] = {}
        read = set[int]()
        for number, pattern in enumerate(patterns):
            backwards[pattern], reads, storages = self._capture_pattern(
                index, forward, pattern, owned, returned, again=number + 1 < len(patterns)
            )
            later_reads |= reads
            read |= storages
        device_type = self.slot.backend.device_type
        region = Region(
            index,
            name,
            forward.graph,
            forward.inputs,
            outputs,
            forward.facts,
            forward.entries,
            self._context(forward, later_reads, read),
            ParameterEdge([original[id(a)] for a in owned]),
            (device_type, kernel_settings(device_type)),
            CallModes.now(device_type),
            [original[id(a)] for a in returned],
            backwards,
            summed,
            sorted({list(made)[place] for _, read in readers for _, place in read}),
            [number for number, out in enumerate(forward.outputs) if storage_of(out) in read],
        )
        self.arriving = defaultdict(list, {k: v for k, v in self.arriving.items() if k[0] != index})
        self.origins = {
            key: origin for key, origin in self.origins.items() if origin.producer != index
        }
        self.made[index], forward.outputs, forward.leaves, forward.origins, forward.statics = (
            [],
            [],
            [],
            [],
            [],
        )
        return region

    def _context(
        self, forward: _Forward, later: dict[Place, torch.Tensor], read: set[int]
    ) -> Context:
        """later: what backwards read from outside. read: storages of all that they read."""
        slot = {storage_of(leaf) for leaf in forward.leaves}
        reads = self._originals(
            {place: t for place, t in forward.uses.reads.items() if place[0] not in slot}
        )
        written = {place: t for place, t in forward.uses.writes.items() if place[0] not in slot}
        writes = self._changing(written)
        counted = self._changing(
            {place: t for place, t in written.items() if place not in forward.uses.uncounted}
        )
        # Autograd saves parameters that a backward does not need after all, and raises when they
        # have changed.
        saved = {
            key: t
            for key, t in reads.items()
            if isinstance(t, torch.nn.Parameter) and key not in writes
        }
        first = self._originals(later) | saved
        reads = first | reads
        generators = [  # graphs of a device draw from none of the host
            each
            for each in self.slot.backend.generators()
            if forward.uses.draws and each.device.type == self.slot.backend.device_type
        ]
        return Context(
            partial(self.program.run, forward.run),
            self.changed,
            self.calls,
            self.gradients,
            list(reads.values()),
            list(first.values()),
            [tensor.data_ptr() for tensor in first.values()],
            list(writes.values()),
            list(counted.values()),
            generators,
            [
                number
                for number, (entry, leaf) in enumerate(
                    zip(forward.inputs, forward.leaves, strict=True)
                )
                if entry.buffer is not None and storage_of(leaf) in read
            ],
            asks_later=self.dry_run.guards.recomputes or runs_python(forward.outputs),
        )

    def _changing(self, written: dict[Place, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of `written` whose values are others afterwards: not parameters that are gathered,
        which have the same values whenever somebody reads them."""
        found = self._originals(written)
        return {key: tensor for key, tensor in found.items() if not is_gathered(tensor)}

    def _originals(self, found: dict[Place, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Tensors by whose versions changes are seen: parameters in place of their aliases, which
        count alone."""
        originals: dict[int, torch.Tensor] = {}
        for (cdata, address), tensor in found.items():
            chosen: list[torch.Tensor] = [
                p
                for start, stop, p in self.aliases.memory.get(cdata, ())
                if start <= address < stop
            ]
            originals.update((id(original), original) for original in chosen or [tensor])
        return originals

    def _patterns(self, index: int, forward: _Forward) -> tuple[list[Pattern], bool]:
        """The patterns of gradients to capture backwards for: those that were learned, or what is
        expected; and whether autograd has to add up gradients of an output."""
        expected: list[Layout | None] = []
        summed = False
        for number, output in enumerate(forward.outputs):
            later = self.arriving[(index, number)]
            exposed = (index, number) in self.exposed
            summed = summed or len({reader for reader, _, _ in later}) + exposed > 1
            layout: Layout | None = None
            if output.requires_grad and later:
                layout = layout_of(later[0][1])
            elif output.requires_grad and exposed:
                known = self.exposed[(index, number)]
                layout = layout_of(output) if known is None else known
            expected.append(layout)
        learned = [
            pattern for pattern in self.gradients.known(index) if len(pattern) == len(expected)
        ]
        patterns = learned or [tuple(expected)]
        # Compiled code gives up what it has saved in its first backward.
        patterns = patterns[-1:] if self.program.compiles else patterns
        patterns = [each for each in patterns if any(layout is not None for layout in each)]
        return patterns, summed

    def _capture_pattern(
        self,
        index: int,
        forward: _Forward,
        pattern: Pattern,
        owned: list[Any],
        returned: list[Any],
        again: bool,
    ) -> tuple[Backward, dict[Place, torch.Tensor], set[int]]:
        """Capture the backward of a pattern. again: another one follows, so the autograd graph
        stays.

        Returned with what it reads from outside, and the storages of all that it reads.
        """
        incoming = self._incoming(index, forward, pattern)
        leaves = list({id(leaf): leaf for leaf in forward.leaves if leaf.requires_grad}.values())
        original, numbers = self.aliases.parameter_of, self.aliases.numbers
        buffers = {
            id(alias): self.buffers.buffer(
                original[id(alias)], self.dry_run.placements.get(numbers[id(alias)])
            )
            for alias in owned
        }
        for alias in owned:
            alias.grad = buffers[id(alias)].tensor
        grad_outputs = self._grad_outputs(forward)
        starts = [forward.outputs[number] for number in incoming]
        uses = Uses(self.storages)

        def run() -> None:
            with uses:
                _backward(
                    starts,
                    [gradient for gradient, _ in incoming.values()],
                    [*leaves, *owned, *returned],
                    owned,
                    grad_outputs,
                    again,
                )

        # Autocast ends with the forward: its own operations know what they were cast to.
        with torch.autocast(self.slot.device.type, enabled=False):
            graph, _ = self.window.capture(run, scratch=True)
        statics = {number: static for number, (_, static) in incoming.items()}
        # A parameter that the backward does not reach has no gradient: nothing is added to its
        # `.grad`.
        reached = [
            buffer
            for buffer in buffers.values()
            if local_tensor(buffer.tensor).data_ptr() in uses.addresses
        ]
        graph.name = self._range(forward.run, "backward")
        backward = Backward(graph, statics, [], reached, [])
        self._collect(index, forward, backward, owned, returned, grad_outputs)
        ours = [
            *forward.leaves,
            *(gradient for gradient, _ in incoming.values()),
            *(local_tensor(buffer.tensor) for buffer in buffers.values()),
            *(grad_output for _, grad_output in grad_outputs),
        ]
        known = {storage_of(tensor) for tensor in ours}
        outside = {place: tensor for place, tensor in uses.reads.items() if place[0] not in known}
        return backward, outside, uses.storages

    def _incoming(
        self, index: int, forward: _Forward, pattern: Pattern
    ) -> dict[int, tuple[torch.Tensor, Static]]:
        """Returns the tensors in which gradients of outputs arrive: where a later region leaves
        them, or in a buffer of the slot."""
        incoming: dict[int, tuple[torch.Tensor, Static]] = {}
        for number, layout in enumerate(pattern):
            if layout is None:
                continue
            later = [
                (gradient, static)
                for _, gradient, static in self.arriving[(index, number)]
                if layout_of(gradient) == layout
            ]
            if later:
                incoming[number] = later[0]
            else:
                buffer = self.slot.buffer(
                    ("gradient", index, number), forward.outputs[number], layout
                )
                incoming[number] = buffer, Owned(buffer)
        return incoming

    def _users(self) -> Counter[int]:
        """Counts the parts of the call that use each alias, by its identity: segments, and eager
        stages together."""
        forwards = self.forwards.values()
        segments = Counter(id(alias) for forward in forwards for alias in forward.parameters)
        return segments + Counter(self.used_eagerly)

    def _grad_outputs(self, forward: _Forward) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs whose gradient is read later than right after the replay, with memory of the slot
        that takes it in."""
        read_later = {
            id(leaf): leaf
            for entry, leaf in zip(forward.inputs, forward.leaves, strict=True)
            if leaf.requires_grad and entry.lend
        }
        return [(leaf, self.window.allocate(leaf.detach())) for leaf in read_later.values()]

    def _collect(
        self,
        index: int,
        forward: _Forward,
        backward: Backward,
        owned: list[Any],
        returned: list[Any],
        grad_outputs: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Take the gradients that the backward left on its leaves."""
        grad_output_of = {id(leaf): grad_output for leaf, grad_output in grad_outputs}
        for alias in owned:
            alias.grad = None
        for alias in returned:
            backward.returned.append(
                None if alias.grad is None else static_gradient(self.window, alias.grad)
            )
            alias.grad = None
        for entry, leaf, origin in zip(
            forward.inputs, forward.leaves, forward.origins, strict=True
        ):
            if leaf.grad is None:  # or one that another place of the same tensor has taken
                backward.gradients.append(None)
                continue
            gradient = grad_output_of.get(id(leaf), leaf.grad)
            static = self.window.static(gradient)
            backward.gradients.append(static)
            if origin.producer is not None:
                self.arriving[(origin.producer, origin.number)].append((index, gradient, static))
            elif (
                entry.lend
            ):  # read when the last backward has run: none of those to come may take its memory
                self.lent.append(gradient)
            leaf.grad = None


def refuse_changed_inputs(versions: list[int], inputs: list[torch.Tensor], name: str) -> None:
    """Raise CaptureError when captured code, called `name`, has written to one of its inputs.
    versions: before."""
    if versions != [version_of(leaf) for leaf in inputs]:
        raise CaptureError(
            f"{name} changes one of its inputs in place",
            user_line(),
            "write to a new tensor: the caller's tensor would not change when the graph is "
            "replayed",
        )


def _refuse_sums(
    name: str,
    outputs: list[torch.Tensor],
    returned: list[torch.nn.Parameter],
    later: list[torch.nn.Parameter],
    users: Mapping[int, int],
) -> None:
    """Raises CaptureError where captured code would hand gradients to autograd that are summed
    otherwise than in eager calls.

    Those of a sharded parameter have to be sent to other ranks by the graph. Those of a parameter
    that it uses several times, and later parts of the call, too, it would add up first, while
    autograd adds each to what has come before. Those of a DTensor that is whole on all ranks are
    shares of a sum over ranks (`Partial`): of several parts, added to a `.grad` that is there, they
    have other bits in replays than in eager backwards.

    Args:
        name: Of the code.
        outputs: Its outputs.
        returned: Parameters whose gradients go through autograd.
        later: Those of them that a later part of the call uses, too: its backward comes before.
        users: Number of users of each, by identity.
    """
    late = next((parameter for parameter in returned if is_sharded(parameter)), None)
    if late is not None:
        raise CaptureError(
            f"{name} shares a sharded parameter of shape {list(late.shape)} with other segments, "
            "or somebody watches its gradient: it would be added after ranks have added theirs up",
            user_line(),
            "capture the whole layer as one segment, without hooks on its parameters",
        )
    readers = summed_gradients(outputs) if later else {}
    several = next((one for one in later if readers.get(id(one), 0) > 1), None)
    if several is not None:
        raise CaptureError(
            f"{name} uses a parameter of shape {list(several.shape)} {readers[id(several)]} times, "
            "and so does what comes after it: gradients would be summed in another order",
            user_line(),
            "capture both as one segment, or the uses as segments of their own",
        )
    for parameter in returned:
        copied = isinstance(parameter, DTensor) and all(
            placement.is_replicate() for placement in parameter.placements
        )
        if copied and users[id(parameter)] > 1:
            raise CaptureError(
                f"{name} shares a DTensor of shape {list(parameter.shape)}, whole on every rank, "
                "with other segments or eager stages: gradients would be summed in another order",
                user_line(),
                "capture all that uses it as one segment (granularity='chunk')",
            )


def _backward(
    starts: list[Any],
    gradients: list[Any],
    wanted: list[Any],
    owned: list[Any],
    grad_outputs: list[tuple[torch.Tensor, torch.Tensor]],
    again: bool,
) -> None:
    """Runs the code that a backward graph captures."""
    with adding_together(owned):
        torch.autograd.backward(starts, gradients, inputs=wanted, retain_graph=again)
    with torch.no_grad():
        for leaf, grad_output in grad_outputs:
            if leaf.grad is not None:
                grad_output.copy_(leaf.grad)


def check_outputs(result: Any) -> None:
    """Raise CaptureError when a call's outputs hold something a replay could not make again."""
    for leaf in tree_leaves(result):
        if not isinstance(leaf, torch.Tensor | int | float | str | bool | None):
            remedy = "return tensors in tuples, lists or dicts. " + LEAVE_OUT
            if hasattr(
                leaf, "get_seq_length"
            ):  # what language models call a cache of keys and values
                remedy = (
                    "it is a cache for generation, which training does not need: "
                    "model.config.use_cache = False"
                )
            raise CaptureError(
                f"the module returns a {type(leaf).__name__}, which a graph cannot make",
                user_line(),
                remedy,
            )
