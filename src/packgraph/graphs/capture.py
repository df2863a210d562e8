"""One capture as a transaction: either a variant is ready, or everything is as before and the error says where.

What is undone in both cases: writes to tensors that existed before (journal), random generator states, the state of
Python's garbage collector, the autocast cache setting, the module's parameters and attributes, Python's and numpy's
random states.
"""
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import saved_tensors
from packgraph.graphs.backend import Backend
from packgraph.graphs.build import Variant, VariantBuild, check_outputs, detached_state
from packgraph.graphs.effects import HostEffects, ObservedProgram
from packgraph.graphs.errors import CaptureError, raised_line
from packgraph.graphs.exclusive import one_capture
from packgraph.graphs.guard import LEAVE_OUT, HostReadGuard, Journal, Watch, compiled_stages, known_generators
from packgraph.graphs.host_calls import watch_also
from packgraph.graphs.parameters import GradientBuffers, aliased_parameters, module_generators
from packgraph.graphs.program import Program, hide_lengths, with_lengths
from packgraph.graphs.slot import Slot
from packgraph.plan.memory.bank import Lifetime

# What capturing user code may raise: torch reports illegal operations as RuntimeError, and code that meets a tensor
# where it expected a number raises one of the others. Anything else is not ours to interpret.
Observed = dict[int, set[int]]
USER_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError)


@contextlib.contextmanager
def undone(module: torch.nn.Module, backend: Backend, effects: HostEffects | None = None,
           watched: bool = True) -> Iterator[Journal]:
    """Undo every effect on tensors, random generators and the module's Python state when the block ends.

    effects: of the module, if somebody else tells it where eager code runs. watched: whether calls of Python code are
    looked at, which slows compilers down. Raises CaptureError, after undoing all,
    when the block has changed Python state that a replay would not change.
    """
    with one_capture():
        yield from _undone(module, backend, effects or HostEffects(module), watched)


def _undone(module: torch.nn.Module, backend: Backend, effects: HostEffects, watched: bool) -> Iterator[Journal]:
    journal = Journal()
    backend.extra_generators = module_generators(module)
    generators = backend.generators()
    collecting = gc.isenabled()
    gc.disable()
    torch.clear_autocast_cache()
    with torch.no_grad():
        for buffer in module.buffers():
            journal.before_write(buffer)
    effects.begin(generators)
    journal.draws = effects.draws
    try:
        with known_generators(generators), effects.draws.watching() if watched else contextlib.nullcontext():
            yield journal
        effects.check()
    finally:
        effects.undo()
        torch.clear_autocast_cache()
        with torch.no_grad():
            journal.restore()
        if collecting:
            gc.enable()


class Rehearsal(NamedTuple):
    """What captured code uses that was there before. read: tensors; whoever keeps the graphs must keep them, since a
    graph knows only their addresses. written: those that forwards write to, and buffers among them. Both are empty
    where the backend needs no rehearsal (it sees and keeps all itself)."""

    read: list[torch.Tensor]
    written: list[torch.Tensor]


def capture_variant(program: Program, backend: Backend, slot: Slot, buffers: GradientBuffers, observed: Observed,
                    lends: bool, args: tuple[Any, ...], kwargs: dict[str, Any], rehearsal: Rehearsal,
                    lifetimes: list[Lifetime] | None = None) -> Variant:
    """Capture all regions of `program` for a call with these arguments into `slot`.

    rehearsal: of the same call. lifetimes: of a trial, gets what is allocated in the slot's pools, which are empty,
    oldest first. Raises CaptureError; nothing has changed then.
    """
    effects = HostEffects(program.module, program.volatile, program.assigned)
    with explained(), undone(program.module, backend, effects) as journal, \
            aliased_parameters(program.module) as aliases, compiled_code(program.compiler is not None, fixed=True):
        watched = ObservedProgram(program, effects)
        backend.lanes.memories.let_go()
        with backend.window(slot.pool, slot.brief, journal, lifetimes is not None) as window:
            build = VariantBuild(watched, slot, window, aliases, buffers, observed, journal, lends, rehearsal.written)
            variant = build.capture(args, kwargs)
        if lifetimes is not None:
            lifetimes += window.lifetimes()
        return variant


def rehearse(program: Program, backend: Backend, observed: Observed,
             args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsal:
    """Run forward and backward once, watched, where the backend needs a warm-up before it captures.

    Raises CaptureError at the line of an operation that a capture could not hold, while that is still harmless.
    """
    return _once(program, backend, observed, args, kwargs, backend.warm_up)


def compile_ahead(program: Program, backend: Backend, observed: Observed,
                  args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run forward and backward once, watched and undone, so that all compiled code is there before a call needs it.

    Raises CaptureError at the line of what cannot be compiled.
    """
    with contextlib.ExitStack() as stack:
        if saved_tensors.are_watched():  # by a checkpoint, say, which is not to see what this run saves beside the call
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        if program.compiler is not None:
            stack.enter_context(program.compiler.counting())
        _once(program, backend, observed, args, kwargs, lambda work: work(), watched=False)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _once(program: Program, backend: Backend, observed: Observed, args: tuple[Any, ...], kwargs: dict[str, Any],
          how: Callable[[Callable[[], None]], None], watched: bool = True) -> Rehearsal:
    """Have `how` run forward and backward, undone; what captured code has used from outside."""
    effects = HostEffects(program.module, program.volatile, program.assigned)
    shown = ObservedProgram(program, effects)
    with explained(), undone(program.module, backend, effects, watched) as journal, \
            aliased_parameters(program.module) as aliases, compiled_code(program.compiler is not None):
        parameters, found = [*aliases.alias_of.values()], list[Rehearsal]()
        how(lambda: found.append(_run_watched(shown, backend, observed, journal, parameters, args, kwargs)))
        return found[0] if found else Rehearsal([], [])


@contextlib.contextmanager
def compiled_code(there: bool, *, fixed: bool = False) -> Iterator[None]:
    """Within the block captured stages run as compiled code, if `there` is any. fixed: all of it was compiled before,
    and code that would have to be compiled now is an error, since a capture cannot hold that.
    """
    with contextlib.ExitStack() as stack:
        if there:
            stack.enter_context(compiled_stages(fixed))
        yield


def _run_watched(program: Program, backend: Backend, observed: Observed, journal: Journal, parameters: list[Any],
                 args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsal:
    state = detached_state(program.begin(args, kwargs))
    inputs = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    device = backend.guard_device
    read: dict[int, torch.Tensor] = {}
    written: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for run in program.runs:
            if run.captured:
                with HostReadGuard(device), Watch(journal, refuse=True, device=device) as watch:
                    shown = hide_lengths(state)
                    result = program.run(run, shown)
                staged = {t.untyped_storage()._cdata for t in tree_leaves(shown) if isinstance(t, torch.Tensor)}
                read |= {key: tensor for key, tensor in watch.external.items() if key not in staged}
                written |= {key: tensor for key, tensor in watch.written.items() if key not in staged}
                state = with_lengths(state, shown, result)
            else:
                with Watch(journal, refuse=False, device=None):
                    state = program.run(run, state)
        result = program.end(state)
        check_outputs(result)
        leaves = tree_leaves(result)
        used = observed.get(len(leaves)) or range(len(leaves))
        ends = [leaves[number] for number in used if isinstance(leaves[number], torch.Tensor)
                and leaves[number].requires_grad]
        wanted = [t for t in [*parameters, *inputs] if t.requires_grad]
        if ends and wanted:
            if backend.device_type == "cuda":
                for end in ends:
                    end.register_hook(watch_also())
            with HostReadGuard(device), Watch(journal, refuse=True, device=device), \
                    torch.autocast(backend.device_type, enabled=False):
                torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return Rehearsal([tensor.detach() for tensor in read.values()], [tensor.detach() for tensor in written.values()])


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn whatever user code raises during a capture into a CaptureError at the user's line."""
    try:
        yield
    except CaptureError:
        raise
    except USER_ERRORS as error:
        what = str(error).strip().split("\n")[0] or type(error).__name__
        raise CaptureError(f"{type(error).__name__} while capturing: {what}", raised_line(error.__traceback__),
                           LEAVE_OUT) from error


