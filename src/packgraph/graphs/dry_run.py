"""Checked eager run of a call before it is captured.

A dry run executes forward and backward as a capture would, on copies of nothing but with
everything undone. It traces what is new (`front.py`), and finds what a graph could not hold at the
user's line, while that is still harmless. What it does is undone when it ends (`undone.py`),
whether it fails or not.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map

from packgraph.graphs.backend import Backend
from packgraph.graphs.build import (
    check_outputs,
    refuse_changed_inputs,
)
from packgraph.graphs.checks.calls import Constants, DryRun
from packgraph.graphs.checks.host_sync import LEAVE_OUT, CaptureChecker, Journal, compiled_stages
from packgraph.graphs.errors import CaptureError, forward_line, user_line
from packgraph.graphs.gradients import without_content
from packgraph.graphs.guards import Guards, refuse_host_memory
from packgraph.graphs.output_gradients import KeyGradients, leaves_behind
from packgraph.graphs.parameters import aliased_parameters, local_tensor, storage_of
from packgraph.graphs.program import (
    Program,
    detached_state,
    hide_lengths,
    numbers_of_tensors,
    reading,
    with_lengths,
)
from packgraph.graphs.stages import Run, State
from packgraph.graphs.trust import Trusted
from packgraph.graphs.undone import explained, undone
from packgraph.torch_internals import saved_tensor_hooks, version_of

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


def dry_run(call: CapturedCall) -> DryRun:
    """Run forward and backward once, watched and undone.

    Raises CaptureError at the line of what a capture could not hold, or a replay would not do.
    """
    return _once(call, call.backend.warm_up)


def compile_ahead(call: CapturedCall) -> None:
    """Run forward and backward once, watched and undone, so that all compiled code is there before
    a call needs it.

    Raises CaptureError at the line of what cannot be compiled.
    """
    with contextlib.ExitStack() as stack:
        # Of a checkpoint, say, which is not to see what this run saves beside the call.
        if saved_tensor_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        assert call.program.compiler is not None, "compiled code is compiled"
        stack.enter_context(call.program.compiler.counting())
        _once(call, lambda work: work())


def _once(call: CapturedCall, how: Any) -> DryRun:
    """Have `how` run forward and backward, undone; what captured code has used from outside."""
    program = call.program
    with explained():
        ahead = program.read(call.args, call.kwargs)
    used = [] if program.staged else list(ahead)
    with (
        explained(),
        torch.set_grad_enabled(torch.is_grad_enabled()),  # forward may leave it switched
        undone(program.module, call.backend) as journal,
        aliased_parameters(program.module) as aliases,
        compiled_stages(program.compiles),
        reading(used) if program.staged else contextlib.nullcontext(),
    ):
        own = [*aliases.alias_of.values()]
        run = _CheckedRun(program, call.backend, call.gradients, journal, own, used)
        how(lambda: run(call.args, call.kwargs))
    refuse_host_memory(used, call.backend.guard_device)
    parameters = dict(program.module.named_parameters())
    lists = ahead if program.staged else ()
    guards = Guards(used, parameters, bool(ahead) and not program.staged, lists)
    return DryRun(
        [tensor.detach() for tensor in run.read.values()],
        [tensor.detach() for tensor in run.written.values()],
        run.constants,
        run.placements,
        journal.has_drawn,
        guards,
    )


class _CheckedRun:
    """A watched run of `program`, whose parameters have aliases: `parameters`."""

    def __init__(
        self,
        program: Program,
        backend: Backend,
        gradients: KeyGradients,
        journal: Journal,
        parameters: list[Any],
        traces: Sequence[tuple[Any, Any]],
    ) -> None:
        self.program, self.gradients, self.journal = program, gradients, journal
        self.parameters, self.buffers = parameters, list(program.module.buffers())
        self.traces = traces  # of what is captured, and of whom
        self.device, self.device_type = backend.guard_device, backend.device_type
        self.where = forward_line(program.module)
        self.constants = Constants()
        self.read: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.made = set[int]()  # storages
        self.placements: dict[int, tuple[Placement, ...]] = {}
        self.known: dict[int, torch.Tensor] = {}  # leaves that are no business of captured code
        self.walked: set[Any] = set()  # nodes of autograd's graph whose leaves were looked at
        self.ends: list[
            tuple[list[torch.Tensor], list[torch.Tensor]]
        ] = []  # of backwards to come, and their inputs
        self.whole = all(run.captured for run in program.runs)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = detached_state(self.program.begin(args, kwargs), numbers_of_tensors(args, kwargs))
        inputs = _tensors(state)
        self._know([*self.parameters, *inputs])
        result = self.program.end(self.program.execute(state, self))
        check_outputs(result)
        if self.whole:
            leaves = tree_leaves(result)
            self.ends = [([leaves[number] for number in self.gradients.expected(leaves)], inputs)]
        self.walked.clear()
        while self.ends:
            self._backward(*self.ends.pop())

    def _know(self, tensors: list[torch.Tensor]) -> None:
        self.known |= {id(tensor): tensor for tensor in tensors}

    def captured(self, index: int, run: Run, state: State) -> State:
        """Run code that a graph will hold, watched."""
        shown = hide_lengths(state)
        if not self.whole:  # as in a capture: hooks of eager code are on other tensors
            shown = detached_state(shown, {id(tensor) for tensor in _tensors(shown)})
        given = _tensors(shown)
        self._know(given)
        with (
            self.constants.remembering(),
            CaptureChecker(self.journal, refuse=True, device=self.device) as watch,
        ):
            versions, mode = [version_of(leaf) for leaf in given], torch.is_grad_enabled()
            outside = [*self.parameters, *self.buffers, *given]
            forms = list(map(_form, outside))
            result = self.program.run(run, shown)
            if list(map(_form, outside)) != forms:
                raise CaptureError(
                    "forward gives a tensor from outside other memory, another form, a gradient or "
                    "another requires_grad: a replay would not do it",
                    self.where,
                    "do it outside of forward, or write to the tensor in place. " + LEAVE_OUT,
                )
            if torch.is_grad_enabled() is not mode:
                raise CaptureError(
                    "forward switches gradients on or off and leaves it so: a replay would not",
                    self.where,
                    "use torch.enable_grad() or torch.no_grad() as a context. " + LEAVE_OUT,
                )
            refuse_changed_inputs(versions, given, self.program.describe(run))
        given_by_others = {id(t) for trace, owner in self.traces for t in trace.tensors(owner)}
        for leaf in leaves_behind(tree_leaves(result), self.walked):
            is_read = self.traces and not isinstance(self.traces[0][0], Trusted)
            foreign = id(leaf) in given_by_others if is_read else not watch.has_made(leaf)
            if foreign and id(leaf) not in self.known:
                raise CaptureError(
                    f"{self.program.describe(run)} uses a tensor of shape {tuple(leaf.shape)} that "
                    "needs a gradient "
                    "but is no registered parameter of the module",
                    user_line(),
                    "register it (nn.Parameter attribute or register_parameter), or pass it as an "
                    "argument",
                )
        # An earlier run of stages may have made what this one reads.
        inside = {storage_of(t) for t in given} | self.made
        for mine, seen in ((self.read, watch.external), (self.written, watch.written)):
            mine.update((key, tensor) for key, tensor in seen.items() if key not in inside)
        self.made |= watch.made
        state = with_lengths(state, shown, result)
        return state if self.whole else self._cut(state, given, watch)

    def _cut(self, state: Any, given: list[torch.Tensor], watch: CaptureChecker) -> Any:
        """What captured code has made, as copies of their own: eager stages may keep what they are
        given, and register hooks. The backward begins at the originals."""
        before = {id(tensor) for tensor in given}
        made = [tensor for tensor in _tensors(state) if id(tensor) not in before]
        made = [tensor for tensor in made if watch.has_made(tensor)]
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
        if self.journal.draws is not None:
            for end in ends:
                end.register_hook(self.journal.draws.listen)
        with (
            CaptureChecker(self.journal, refuse=True, device=self.device),
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_tensor(tensor)
    place = (local.data_ptr(), local.stride()) if local.layout is torch.strided else None
    gradient = id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None
    return place, local.shape, tensor.requires_grad, gradient
