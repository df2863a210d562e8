"""A reference run: what a replay computes, held against a plain call of the user's own objects.

Graphs are captured on substitutes (aliases of parameters, copies of arguments, private random
generators, torch's modes around), and what stands in for something may compute otherwise. So the
first replay of every key is compared bit by bit with a call of the module itself:

    plain call   dry runs ─▶ module(*args), backward ─▶ facts, all undone      before the capture
    replay       captured ─▶ the same arguments, state, draws ─▶ facts, all undone      after it

Facts are the outputs, the gradients of arguments and parameters, buffers and parameters that are
written to, and the states of random generators afterwards. Outputs get fixed gradients, those of
the newest pattern that is known. NaN equals NaN; -0.0 differs from 0.0.

The plain call comes before the capture since it needs the activations of an eager step, which a
capture has room for itself only while no graph exists; a digest of every fact is all that is kept.
The digest is a sum of all numbers, read as integers and weighted by odd numbers, modulo 2**64: it
finds every change of a single element. Gradients of parameters are digested as they arrive, and let
go (but those of compiled code, which adds to `.grad` itself). All digests are read at once.

Where digests differ more runs measure by how much: a plain call keeps the values of what differs,
on the device if there is room, and rounds of another plain call and a replay are held against
these as they arrive. If plain calls repeat themselves, and replays do, in every round, the
difference is an error. If they do not (atomic additions, as in the backward of attention), it may
be four times as large as that of plain calls, and four units in the last place of the tensor's
largest element more, since two calls may be alike by chance. The unit is that of the coarsest type
that the module computes in: a float32 gradient is a sum of rounded bfloat16 numbers.

Not compared:

* gradients of sharded parameters: ranks add them up while a backward runs; gradients where several
  threads train, which may add to `.grad` meanwhile; gradients where stages stay eager, whose own
  hooks would see gradients of no step. Outputs and states are;
* modules that draw random numbers while other threads live that may draw from the same generators:
  two calls get other numbers;
* backwards for older patterns than the newest, which were compared when they were the newest;
* further slots of a key, whose graphs were captured from the same code; graphs that trials throw
  away; whole steps (`step.py`), which run an optimizer; compiled code with other code: the plain
  call is that of the same compiled code.

Hooks of parameters do not run. Those of modules do, and all other Python code of a forward: once
for each run, as in a dry run. Ranks that capture together run all of this together, and vote on
whether there is a difference.
"""

import contextlib
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    CaptureChecker,
    Journal,
    compiled_stages,
    copied,
)
from packgraph.graphs.checks.random_state import is_alone
from packgraph.graphs.dry_run import CapturedCall
from packgraph.graphs.errors import CaptureError, forward_line
from packgraph.graphs.fallback import Stats
from packgraph.graphs.gradients import GradientBuffers, with_local, without_memory
from packgraph.graphs.key import Layout, contiguous_strides, own_strides
from packgraph.graphs.notices import named_leaves
from packgraph.graphs.output_gradients import OutputGradients
from packgraph.graphs.parameters import is_sharded, local_tensor, storage_of, without_hooks
from packgraph.graphs.program import open_objects
from packgraph.graphs.region import Region
from packgraph.graphs.replay import Ends, ReplayHandle, Variant
from packgraph.graphs.slots import Calls, Slot, SlotLease, Slots
from packgraph.graphs.undone import explained, undone

CHUNK = 2**25  # numbers that are looked at in one piece
_ROUNDS = 4  # of runs that measure a difference, at most
_FACTOR = 4  # of the difference of two plain calls, where they differ
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEED = 45

Tensors = list[torch.Tensor]


class _Facts:
    """Outcomes of one run: `digests` of all, and `values` of those in `names`.

    With `known` these have `gaps` instead: the largest difference from its values, and one unit in
    the last place, no finer than `unit`."""

    def __init__(
        self, names: Container[str] = (), known: "_Facts | None" = None, unit: float = 0.0
    ) -> None:
        self.digests, self.values, self.gaps = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        self._names, self._known, self._unit = names, known, unit
        self._beside = 0  # bytes of values on the device

    def note(self, name: str, value: Any) -> None:
        """A fact: a tensor, or text."""
        is_tensor = isinstance(value, torch.Tensor)
        self.digests[name] = digest(value) if is_tensor else value
        if name in self._names:
            value = _flat(value) if is_tensor else value
            if self._known is not None:
                self.gaps[name] = _gap(self._known.values.get(name), value, self._unit)
            else:
                self.values[name] = self._kept(value) if is_tensor else value

    def _kept(self, flat: torch.Tensor) -> torch.Tensor:
        kept = copied(flat.view(torch.uint8), self._beside)
        self._beside += kept.numel() if kept.device.type == "cuda" else 0
        return kept.view(flat.dtype)

    def read(self) -> "_Facts":
        """Makes numbers of what the device has found: waits for it."""
        for found in (self.digests, self.gaps):
            there = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
            device = next((each.device for each in there.values()), None)
            if there:
                numbers = torch.stack([each.to(device) for each in there.values()]).tolist()
                found.update(zip(there, numbers, strict=True))
        return self

    def differing(self, other: "_Facts") -> list[str]:
        """The names of facts that are not the same in both runs."""
        names = dict.fromkeys((*self.digests, *other.digests))
        return [name for name in names if self.digests.get(name) != other.digests.get(name)]


class _Borrowed(SlotLease):
    """The slot of a call that is about to be made, which it goes back to."""

    def release(self) -> None:
        """See SlotLease."""
        self.released = True


class Reference:
    """One call as the module itself makes it, for replays to be compared with."""

    def __init__(
        self,
        call: CapturedCall,
        slots: Slots,
        calls: Calls,
        buffers: GradientBuffers,
        ends: Ends | None,
        together: bool = False,
    ) -> None:
        """Args:
        call: The call.
        slots: Of the module.
        calls: Of the module.
        buffers: That graphs add gradients to.
        ends: Of a variant of the same key, if one was captured before.
        together: Whether all ranks compare, whatever threads there are.
        """
        self._alone, self._together = together or is_alone(), together
        self._whole = all(run.captured for run in call.program.runs)
        self.call, self._slots, self._calls, self._ends = call, slots, calls, ends
        self._buffers, self.module = buffers, call.program.module
        self._written, self._touched = list[torch.Tensor](), list[torch.Tensor]()
        self._parameters = {  # by the name of the fact
            f"the gradient of parameter {name!r}": each
            for name, each in self.module.named_parameters()
            if each.requires_grad
        }
        floats = (each for each in self.module.parameters() if each.is_floating_point())
        # Of eight bits is what is stored, not what sums are made of.
        kinds = {each.dtype for each in floats if each.itemsize > 1}
        if torch.is_autocast_enabled(call.backend.device_type):
            kinds.add(torch.get_autocast_dtype(call.backend.device_type))
        self._unit = max([0.0, *(torch.finfo(kind).eps for kind in kinds)])
        self._known: _Facts | None = None

    def run_plainly(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], draws: bool
    ) -> None:
        """Makes the call, if it can be compared.

        Args:
            written: Memory from outside, beside buffers, that forward writes to.
            read: What it reads. Code whose operations torch does not see may write to that.
            draws: Whether it draws random numbers.
        """
        if self._alone or (self._whole and not draws):
            weights = set(map(storage_of, self.module.parameters()))
            others = [memory for memory in read if storage_of(memory) not in weights]
            self._written, self._touched = list(written), [*written, *others]
            self._known = self._plain(_Facts())

    def is_met_by(
        self, variant: Variant, slot: Slot, anywhere: Callable[[str | None], bool]
    ) -> bool:
        """Replays a variant and compares.

        Args:
            variant: Captured for the call.
            slot: Where.
            anywhere: Given what differs on this rank, or None: whether any rank has a difference.

        Returns:
            Whether there was something to compare with.

        Raises:
            CaptureError: The replay has made something else.
        """
        if self._known is None:
            return False
        first = self._replayed(variant, slot, _Facts())
        differing = self._known.differing(first)
        if not anywhere(next(iter(differing), None)):
            return True
        one, repeats = self._plain(_Facts(differing)), True
        spread, distance = dict.fromkeys(differing, 0.0), dict.fromkeys(differing, 0.0)
        place, wrong = dict.fromkeys(differing, 0.0), list[str]()
        for _ in range(_ROUNDS):
            two = self._plain(_Facts(differing, one, self._unit))
            replayed = self._replayed(variant, slot, _Facts(differing, one, self._unit))
            pairs = (self._known, one), (one, two), (first, replayed)
            repeats = repeats and not any(before.differing(after) for before, after in pairs)
            for name in differing:
                gap, place[name] = two.gaps.get(name, (0.0, 0.0))
                spread[name] = max(spread[name], gap)
                distance[name] = max(distance[name], replayed.gaps.get(name, (inf, 0.0))[0])
            wrong = [
                name
                for name in differing
                if repeats or distance[name] > _FACTOR * (spread[name] + place[name])
            ]
            # Ranks make all rounds, since one that fails in a round does not come to vote on it.
            if not wrong and not self._together:
                return True
        if wrong:
            raise self._error(variant, wrong[0], distance[wrong[0]], spread[wrong[0]])
        return True

    def _error(self, variant: Variant, name: str, distance: float, spread: float) -> CaptureError:
        ends = {f"output {number}": end for number, end in enumerate(variant.ends)}
        made, end = self._parameters.get(name), ends.get(name)
        stages = [
            region.name
            for number, region in variant.regions.items()
            if (end is not None and number == end[0])
            or any(made is own for own in (*region.parameters.parameters, *region.returned))
        ]
        stage = f" ({stages[0]})" if stages else ""
        return CaptureError(
            f"{name} of {type(self.module).__name__}{stage} is something else in a replay than in "
            f"a call without graphs: they differ by up to {distance:.3g}, two calls without graphs "
            f"by {spread:.3g}",
            forward_line(self.module),
            "an operation runs by another kernel while it is captured (where nothing needs a "
            "gradient torch has fast paths, as in nn.MultiheadAttention), or forward looks at what "
            "stands in for something in a capture. " + LEAVE_OUT,
        )

    def _plain(self, facts: _Facts) -> _Facts:
        program, backend = self.call.program, self.call.backend
        call = (lambda *a, **kw: program.call(a, kw)) if program.compiles else self.module
        backend.warm_up(lambda: self._run(facts, call, None))
        return facts.read()

    def _replayed(self, variant: Variant, slot: Slot, facts: _Facts) -> _Facts:
        spare = OutputGradients(lambda reason: None).of(None)  # nothing is learned
        free = partial(
            replace, gradients=spare, calls=contextlib.nullcontext(), changed=lambda: None
        )
        regions = {
            number: replace(region, context=free(region.context))
            for number, region in variant.regions.items()
        }
        shown, lease = replace(variant, regions=regions), _Borrowed(self._slots, slot)
        handle = ReplayHandle(self.call.program, shown, lease, False, Stats(), self._calls)
        self._run(facts, lambda *a, **kw: handle.replay(a, kw), [*regions.values()])
        return facts.read()

    def _run(
        self, facts: _Facts, call: Callable[..., Any], regions: Sequence[Region] | None
    ) -> None:
        """Makes a call and its backward, notes what they have made, and undoes it. regions: Those
        that are replayed, None in a plain call."""
        program, backend = self.call.program, self.call.backend
        nothing, grads = contextlib.nullcontext, torch.is_grad_enabled()
        with (
            explained(),
            torch.set_grad_enabled(grads),
            without_hooks(self._parameters.values()),
            undone(self.module, backend) as journal,
            journal.draws.allowed() if not self._whole and journal.draws else nothing(),
            journal.draws.moving() if self._alone and journal.draws else nothing(),
            compiled_stages(program.compiles),
            # Eager stages may write to whatever they like.
            nothing() if self._whole else CaptureChecker(journal, refuse=False, device=None),
        ):
            with torch.no_grad():
                for memory in self._touched:
                    journal.before_write(memory)
            given, (args, kwargs) = self._cut()
            leaves, form = tree_flatten(open_objects(call(*args, **kwargs)))
            if torch.is_grad_enabled() and not grads:
                raise CaptureError(
                    "forward switches gradients on, though it was called without them: a graph of "
                    "such calls has no backward",
                    forward_line(self.module),
                    LEAVE_OUT,
                )
            arguments = {id(leaf): place for place, leaf in enumerate(tree_leaves((args, kwargs)))}
            same = [arguments.get(id(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            facts.note("the form of what is returned", repr((form, [*map(_form, leaves)], same)))
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    facts.note(f"output {number}", leaf)
            if layouts := self._layouts(leaves):
                starts = [leaves[number] for number in layouts]
                gradients = list(map(_gradient_of, starts, layouts.values()))
                ends = list(given.values())
                with torch.autocast(backend.device_type, enabled=False):
                    if regions is None and not program.compiles:
                        found = self._differentiate(facts, starts, gradients, ends)
                    else:
                        found = self._add(facts, regions or (), journal, starts, gradients, ends)
                for name, gradient in zip(given, found, strict=False):
                    facts.note(f"the gradient of {name}", gradient)
            for name, buffer in self.module.named_buffers():
                facts.note(f"buffer {name!r}", buffer)
            for number, memory in enumerate(self._written):
                facts.note(f"memory {number} that forward writes to", memory)
            for number, generator in enumerate(backend.generators() if self._alone else ()):
                facts.note(f"the state of random generator {number}", generator.get_state())

    def _differentiate(
        self, facts: _Facts, starts: Tensors, gradients: Tensors, ends: Tensors
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of `ends`; those of parameters are noted as they arrive, and let go."""

        def take(
            name: str, parameter: torch.nn.Parameter, gradient: torch.Tensor | None
        ) -> torch.Tensor | None:
            if gradient is not None:
                facts.note(name, _placed_as(self._buffers.present(parameter), gradient))
            return without_memory(gradient)

        with contextlib.ExitStack() as at_end:
            for name, each in self._parameters.items():
                at_end.callback(each.register_hook(partial(take, name, each)).remove)
            inputs = [*ends, *self._parameters.values()]
            return torch.autograd.grad(starts, inputs, gradients, allow_unused=True)

    def _add(
        self,
        facts: _Facts,
        regions: Sequence[Region],
        journal: Journal,
        starts: Tensors,
        gradients: Tensors,
        ends: Tensors,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of `ends`, by code that adds to `.grad` itself; notes what was added."""
        parameters = self._parameters.values()
        sums = [(each, each.grad) for each in parameters]
        if not regions:  # products of compiled code are added to what is there without arriving
            for each in parameters:
                each.grad = None
        filled = [local_tensor(each.grad) for each in parameters if each.grad is not None]
        for gradient in filled:
            journal.before_write(gradient)
        for gradient in filled:  # to -0.0 everything adds without a change of any bit
            gradient.zero_().neg_()
        newest = [each for region in regions for each in [*region.backwards.values()][-1:]]
        added = {id(buffer.parameter) for each in newest for buffer in each.owned}
        # Those that one graph adds to need not be asked for: nobody sees their nodes, then.
        asked = [each for each in parameters if len(regions) != 1 or id(each) not in added]
        anchors = [region.parameters.anchor for region in regions]
        added.update(id(each) for each in parameters if each.grad is None)

        def note(parameter: torch.Tensor, _: object, arrived: Any) -> None:
            if arrived[0] is not None:
                added.add(id(parameter))

        try:
            with contextlib.ExitStack() as at_end:
                for each in asked:
                    node: Any = torch.autograd.graph.get_gradient_edge(each).node
                    at_end.callback(node.register_hook(partial(note, each)).remove)
                torch.autograd.backward(starts, gradients, inputs=[*ends, *asked, *anchors])
            for name, each in self._parameters.items():
                if each.grad is not None and id(each) in added:
                    facts.note(name, each.grad)
        finally:
            for each, grad in sums:
                each.grad = grad
        return [end.grad for end in ends]

    def _cut(self) -> tuple[dict[str, torch.Tensor], Any]:
        """The call's arguments, cut from what made them; those that need a gradient, by name."""
        args, kwargs = self.call.args, self.call.kwargs
        cut, names = dict[int, torch.Tensor](), dict[str, torch.Tensor]()
        for name, leaf in named_leaves(self.module.forward, args, kwargs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in cut:
                cut[id(leaf)] = names[name] = leaf.detach().requires_grad_()
        # Containers are others: forward may write to them.
        return names, tree_map(lambda leaf: cut.get(id(leaf), leaf), (args, kwargs))

    def _layouts(self, leaves: list[Any]) -> dict[int, Layout]:
        """The outputs that get gradients, and the layouts of those: of the newest pattern."""
        known, found = self.call.gradients, dict[int, Layout]()
        if (
            not self._whole
            or self._slots.launches.shared
            or any(map(is_sharded, self._parameters.values()))
        ):
            return {}
        for number, end in enumerate(self._ends or ()):
            patterns = known.known(end[0]) if end else []
            layout = patterns[-1][end[1]] if end and patterns else None
            if layout is not None:
                found[number] = layout
        return found or known.expected(leaves)


@torch.no_grad()
def _placed_as(sums: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as it is added to `sums`, which may be shares of what it is the whole of."""
    if not isinstance(sums, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if sums.placements == gradient.placements:
        return gradient
    return with_local(sums, torch.full_like(local_tensor(sums), -0.0)).add_(gradient)


def _gradient_of(output: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same numbers for every output of one form."""
    local = local_tensor(output)
    strides = layout or contiguous_strides(local.shape)
    size = 1 + sum((n - 1) * stride for n, stride in zip(local.shape, strides, strict=True))
    memory = torch.empty(max(size, 0), dtype=local.dtype, device=local.device)
    memory.normal_(1.0, 0.25, generator=torch.Generator(local.device).manual_seed(_SEED))
    return with_local(output, memory.as_strided(local.shape, strides))


def _form(leaf: Any) -> Any:
    """What is to be the same of an output beside its numbers."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = own_strides(local_tensor(leaf))
    return type(leaf), tuple(leaf.shape), leaf.dtype, strides, leaf.requires_grad


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number, int64, that tells any two tensors of one form apart that differ in one element, and
    nearly always those that differ in more."""
    flat = _flat(tensor)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(flat.split(CHUNK)):
        if part.is_floating_point() and part.itemsize > 1:
            part = part.nan_to_num(torch.nan, torch.inf, -torch.inf)  # NaN has many bit patterns
        elif part.storage_offset():
            part = part.clone()
        size = gcd(part.numel() * part.itemsize, 8)
        words = part.view(torch.uint8).view(_INTEGERS[size])
        first = 2 * number * CHUNK + 1
        weights = torch.arange(first, first + 2 * words.numel(), 2, device=flat.device)
        total += weights.mul_(words).sum()
    return total


@torch.no_grad()
def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in a row."""
    flat = local_tensor(tensor).detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


@torch.no_grad()
def _gap(known: Any, value: Any, unit: float) -> Any:
    """The largest difference of two values, infinite where they cannot be compared, and one unit in
    the last place of the largest element of the first, of a type no finer than `unit`."""
    if not isinstance(known, torch.Tensor) or not isinstance(value, torch.Tensor):
        return 0.0 if type(known) is type(value) and known == value else inf, 0.0
    if known.numel() != value.numel():
        return inf, 0.0
    parts = [torch.zeros(2, dtype=torch.float64, device=value.device)]
    for pair in zip(known.split(CHUNK), value.split(CHUNK), strict=True):
        one, other = (part.to(value.device, torch.float64) for part in pair)
        same = torch.isclose(one, other, 0.0, 0.0, equal_nan=True)
        gaps = (one - other).abs_().masked_fill_(same, 0.0).nan_to_num_(inf, inf)
        parts.append(torch.stack([gaps.max(), one.abs_().nan_to_num_(0.0, 0.0).max()]))
    worst = torch.stack(parts).amax(0)
    worst[1] *= max(torch.finfo(known.dtype).eps, unit) if known.is_floating_point() else 0.0
    return worst
