"""Checked eager runs of a call before it is captured.

A dry run executes forward and backward as a capture would, on copies of nothing but with
everything undone, until two runs in a row agree: the first may fill caches, so that the second does
less. It finds what a graph could not hold or a replay would not do, at the user's line, while that
is still harmless.

What it does is undone when it ends (`undone.py`), whether it fails or not.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map

from packgraph.graphs import saved_tensors
from packgraph.graphs.backend import Backend
from packgraph.graphs.build import (
    check_outputs,
    detached_state,
    numbers_of_tensors,
    refuse_changed_inputs,
)
from packgraph.graphs.checks.autograd_calls import only_forward
from packgraph.graphs.checks.calls import VARIES, DryRun
from packgraph.graphs.checks.constants import Constants
from packgraph.graphs.checks.escapes import Observation, ObservingChecker
from packgraph.graphs.checks.host_calls import (
    SavedTensorHooks,
    Unseen,
    UnseenLoop,
    unwatched,
    watch_also,
    watched_calls,
)
from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    CaptureChecker,
    HostSyncCheck,
    Journal,
)
from packgraph.graphs.checks.module_state import ModuleState
from packgraph.graphs.checks.side_effects import (
    ObservedProgram,
    Remembered,
    SideEffects,
    forward_line,
    refuse_changes,
)
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.gradients import without_content
from packgraph.graphs.output_gradients import KeyGradients, leaves_behind
from packgraph.graphs.parameters import aliased_parameters
from packgraph.graphs.program import Program, hide_lengths, with_lengths
from packgraph.graphs.stages import Run, State
from packgraph.graphs.undone import compiled_code, explained, undone

_RETURN_GRADIENT = (
    "return the gradient from backward, and pass the parameter to the function as an input"
)


class CapturedCall(NamedTuple):
    """A call that is to be captured, and with what: the program of its module, the backend, and
    what is known of the gradients of such calls."""

    program: Program
    backend: Backend
    gradients: KeyGradients
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def dry_run(
    call: CapturedCall, state: ModuleState | None = None, like: DryRun | None = None
) -> DryRun:
    """Run forward and backward, watched, and forward again, and compare.

    state: of the module, up to date; made here without it. like: of a call of another shape whose
    graphs were captured. Where this one calls the same operations at the same lines, and fills no
    cache, it is not run again: the capture, which compares its calls, is the second run. Raises
    CaptureError at the line of what a capture could not hold, or a replay would not do, while that
    is still harmless: operations, tensors that leave other than through the outputs, numbers that
    differ between the runs.
    """
    state = state or ModuleState(call.program.module)
    if like is not None:
        found = _run_as(like, call, state)
        if found is not None:
            return found
    around = Remembered(state)
    try:
        return _compared(call, state)
    except CaptureError:
        call.program.assigned |= around.moved()  # eager calls do that too: no reason to try again
        around.restore()
        raise


def dry_run_again(call: CapturedCall, earlier: DryRun, state: ModuleState) -> DryRun:
    """Dry-run another capture of calls that were dry-run before: `earlier`.

    A cache that code filled then may have lost it since. Were it filled in a capture, what it holds
    would lie in the graphs' memory, and would have no values until a replay. Raises CaptureError
    where calls are not what they were.
    """
    seen = Observation(Constants())
    with unwatched():
        now = _once(call, partial(call.backend.warm_up, as_called=True), seen, state)
    if not (seen.calls.same_as(earlier.calls) and seen.constants.same_as(earlier.constants)):
        state.moved()
        now = dry_run(call, state)
        if not (now.calls.same_as(earlier.calls) and now.constants.same_as(earlier.constants)):
            raise CaptureError(
                "forward calls other operations than for graphs that were captured before, with "
                "the same arguments, or "
                "gives them other numbers: a graph would freeze them",
                now.constants.first_difference(earlier.constants),
                VARIES,
            )
        return now
    return earlier._replace(calls=now.calls, read=now.read, written=now.written)


def _run_as(like: DryRun, call: CapturedCall, state: ModuleState) -> DryRun | None:
    """One watched run. None where it does other things than that of another shape, or something
    that two runs have to show: what first runs alone may do, say."""
    try:
        now, seen = _watched(call, state, is_first=False)
        seen.check_gone()
    except CaptureError:
        return None
    if seen.calls.path() != like.calls.path() or now.has_host_steps != like.has_host_steps:
        return None
    return now._replace(is_confirmed=False)


def _watched(
    call: CapturedCall, state: ModuleState, *, is_first: bool
) -> tuple[DryRun, Observation]:
    """A run whose calls of Python code are looked at. is_first: caches may be filled in it."""
    seen, steps = Observation(Constants(), is_first=is_first), list[Any]()

    def watched_run(run: Callable[[], None]) -> None:
        with call.backend.watching_host(steps.append):
            call.backend.warm_up(run)

    hooks = SavedTensorHooks()
    with watched_calls(hooks):
        found = _once(call, watched_run, seen, state)
    return found._replace(has_host_steps=bool(steps), unpacks=hooks.are_there), seen


def _compared(call: CapturedCall, state: ModuleState) -> DryRun:
    """Dry-run until two runs in a row agree: the first may have filled caches, so that the second
    does less. One of the two is on the stream of eager calls, which code may ask for."""
    first, seen = _watched(call, state, is_first=True)
    seen.check_gone()
    for as_called in (True, False):
        before, seen = seen, Observation(Constants())
        with unwatched():
            now = _once(call, partial(call.backend.warm_up, as_called=as_called), seen, state)
        seen.check_gone()
        if seen.has_called_as(before):
            return now._replace(has_host_steps=first.has_host_steps, unpacks=first.unpacks)
    raise seen.difference(before)


def compile_ahead(call: CapturedCall) -> None:
    """Run forward and backward once, watched and undone, so that all compiled code is there before
    a call needs it.

    Raises CaptureError at the line of what cannot be compiled.
    """
    with contextlib.ExitStack() as stack:
        if (
            saved_tensors.are_watched()
        ):  # by a checkpoint, say, which is not to see what this run saves beside the call
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        if call.program.compiler is not None:
            stack.enter_context(call.program.compiler.counting())
        _once(
            call,
            lambda work: work(),
            Observation(Constants(), is_first=True),
            ModuleState(call.program.module),
            watched=False,
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _once(
    call: CapturedCall,
    how: Callable[[Callable[[], None]], None],
    seen: Observation,
    state: ModuleState,
    watched: bool = True,
) -> DryRun:
    """Have `how` run forward and backward, undone; what captured code has used from outside. seen:
    is told the rest. state: of the module, up to date then and after. watched: whether draws of
    random numbers on the host are looked for."""
    program = call.program
    effects = SideEffects(program.module, program.volatile, program.assigned, state)
    shown = ObservedProgram(program, effects)
    with (
        explained(),
        torch.set_grad_enabled(torch.is_grad_enabled()),  # forward may switch it and leave it so
        undone(program.module, call.backend, effects, watched) as journal,
        aliased_parameters(program.module) as aliases,
        compiled_code(program.compiler is not None),
    ):
        parameters, found = [*aliases.alias_of.values()], list[DryRun]()
        with UnseenLoop():
            run = _CheckedRun(
                shown, effects, call.backend, call.gradients, journal, parameters, seen
            )
        how(lambda: found.append(run(call.args, call.kwargs)))
    with UnseenLoop():
        state.moved()  # which lets go of what was there in the run
    return found[0]


class _CheckedRun:
    """A watched run of `program`, whose parameters have aliases: `parameters`."""

    def __init__(
        self,
        program: Program,
        effects: SideEffects,
        backend: Backend,
        gradients: KeyGradients,
        journal: Journal,
        parameters: list[Any],
        seen: Observation,
    ) -> None:
        self.program, self.effects, self.gradients, self.journal, self.seen = (
            program,
            effects,
            gradients,
            journal,
            seen,
        )
        self.parameters, self.buffers = parameters, list(program.module.buffers())
        self.device, self.device_type = backend.guard_device, backend.device_type
        self.seen.calls.tell_apart([*parameters, *self.buffers])
        self.where = forward_line(program.module)
        self.read: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.placements: dict[int, tuple[Placement, ...]] = {}
        self.known: dict[int, torch.Tensor] = {}  # leaves that are no business of captured code
        self.walked: set[Any] = set()  # nodes of autograd's graph whose leaves were looked at
        self.ends: list[
            tuple[list[torch.Tensor], list[torch.Tensor]]
        ] = []  # of backwards to come, and their inputs
        self.whole = all(run.captured for run in program.runs)
        self._state: ModuleState | None = None  # with aliases for parameters

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DryRun:
        state = detached_state(self.program.begin(args, kwargs), numbers_of_tensors(args, kwargs))
        inputs = _tensors(state)
        self._know([*self.parameters, *inputs])
        if self.whole:  # eager stages may keep what they are given
            self.seen.hand([*self.parameters, *inputs], self.where)
        result = self.program.end(self.program.execute(state, self))
        check_outputs(result)
        self.seen.calls.note(
            (
                "returns",
                *[repr(leaf) for leaf in tree_leaves(result) if not isinstance(leaf, torch.Tensor)],
            )
        )
        if self.whole:
            leaves = tree_leaves(result)
            self.ends = [([leaves[number] for number in self.gradients.expected(leaves)], inputs)]
        self.walked.clear()
        while self.ends:
            self._backward(*self.ends.pop())
        return DryRun(
            [tensor.detach() for tensor in self.read.values()],
            [tensor.detach() for tensor in self.written.values()],
            self.seen.constants,
            self.seen.calls,
            self.placements,
        )

    def _know(self, tensors: list[torch.Tensor]) -> None:
        self.known |= {id(tensor): tensor for tensor in tensors}

    def captured(self, index: int, run: Run, state: State) -> State:
        """Run code that a graph will hold, watched."""
        shown = hide_lengths(state)
        if not self.whole:  # as in a capture: hooks of eager code are on other tensors
            shown = detached_state(shown, {id(tensor) for tensor in _tensors(shown)})
        given = _tensors(shown)
        self._know(given)
        outside = [*self.parameters, *self.buffers, *given]
        with (
            self._unchanged(),
            HostSyncCheck(self.device, constants_too=False),
            only_forward(outside, self.where, self._assigned),
            self.seen.constants.remembering(),
            ObservingChecker(self.journal, self.device, self.seen, forward=True) as watch,
        ):
            versions = [leaf._version for leaf in given]
            result = self.program.run(run, shown)
            refuse_changed_inputs(versions, given, self.program.describe(run))
        self.seen.returned(result)
        with Unseen():
            leaves = leaves_behind(tree_leaves(result), self.walked)
        for leaf in leaves:
            if id(leaf) not in self.known and not self.seen.has_made(leaf):
                raise CaptureError(
                    f"{self.program.describe(run)} uses a tensor of shape {tuple(leaf.shape)} that "
                    "needs a gradient "
                    "but is no registered parameter of the module",
                    user_line(),
                    "register it (nn.Parameter attribute or register_parameter), or pass it as an "
                    "argument",
                )
        with UnseenLoop():
            staged = {t.untyped_storage()._cdata for t in given}
            # An earlier run of stages may have made what this one reads.
            inside = staged | self.seen.storages()
            for mine, seen in ((self.read, watch.external), (self.written, watch.written)):
                mine.update((key, tensor) for key, tensor in seen.items() if key not in inside)
        state = with_lengths(state, shown, result)
        return state if self.whole else self._cut(state, given)

    def _cut(self, state: Any, given: list[torch.Tensor]) -> Any:
        """What captured code has made, as copies of their own: eager stages may keep what they are
        given, and register hooks. The backward begins at the originals."""
        made = [tensor for tensor in _tensors(state) if self.seen.has_made(tensor)]
        self.ends.append(([tensor for tensor in made if tensor.requires_grad], given))
        copies = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for tensor in made
        }
        self._know(list(copies.values()))
        # What holds none of them stays itself, so that what came through is known to be what it
        # was.
        return {
            key: tree_map(lambda leaf: copies.get(id(leaf), leaf), value)
            if any(id(leaf) in copies for leaf in tree_leaves(value))
            else value
            for key, value in state.items()
        }

    def eager(self, index: int, run: Run, state: State) -> State:
        """Run code that stays eager."""
        with CaptureChecker(self.journal, refuse=False, device=None):
            state = self.program.run(run, state)
        self._know(leaves_behind(tree_leaves(state)))
        return state

    def _backward(self, ends: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        wanted = [t for t in [*self.parameters, *inputs] if t.requires_grad]
        if not ends or not wanted:
            return
        if self.device_type == "cuda":
            for end in ends:
                end.register_hook(watch_also())
        with (
            self._unchanged(),
            self.seen.calls.above(),
            HostSyncCheck(self.device),
            ObservingChecker(self.journal, self.device, self.seen, forward=False),
            torch.autocast(self.device_type, enabled=False),
            without_content(self.parameters),
        ):
            found = torch.autograd.grad(
                ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True
            )
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in found):
            raise CaptureError(
                "a backward makes a sparse gradient: its size depends on data",
                self.where,
                "use dense gradients: nn.Embedding(sparse=False). " + LEAVE_OUT,
            )
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.placements |= {
            numbers[id(leaf)]: gradient.placements
            for leaf, gradient in zip(wanted, found, strict=True)
            if isinstance(gradient, DTensor) and id(leaf) in numbers
        }
        if any(parameter.grad is not None for parameter in self.parameters):
            raise CaptureError(
                "a backward writes to the .grad of a parameter by itself: that would happen at "
                "capture "
                "only, never at a replay",
                self.where,
                _RETURN_GRADIENT,
            )

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Captured code runs in the block. Raises CaptureError for what it changes in Python
        outside of the module; a first run may, since caches are filled then."""
        if self.seen.is_first:
            yield
            return
        if (
            self._state is None or self._state.changed() is not None
        ):  # which eager code may do in between
            self._state = ModuleState(self.program.module)
        yield
        self.effects.check(parameters_too=False)  # which knows the line of an assignment
        refuse_changes(self.program.module, self._state, self.where)

    def _assigned(self, tensor: torch.Tensor) -> None:
        """Captured code gives a parameter or buffer other memory: that eager calls do it is no
        reason to try again."""
        for owner in self.program.module.modules():
            for table in (owner._parameters, owner._buffers):
                self.program.assigned.update(
                    (id(owner), name) for name, value in table.items() if value is tensor
                )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
