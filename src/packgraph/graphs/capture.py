"""One capture as a transaction: either a variant is ready, or everything is as before and the error
says where.

What is undone in both cases: writes to tensors that existed before (journal), random generator
states, the state of Python's garbage collector, the autocast cache setting, the module's parameters
and attributes, Python's and numpy's random states.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from packgraph.graphs.backend import Backend
from packgraph.graphs.build import (
    Variant,
    VariantBuild,
)
from packgraph.graphs.cache import FREE_MEMORY, is_out_of_memory
from packgraph.graphs.checks.calls import DryRun
from packgraph.graphs.checks.host_calls import (
    unwatched,
)
from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    Journal,
    compiled_stages,
    known_generators,
)
from packgraph.graphs.checks.side_effects import ObservedProgram, SideEffects
from packgraph.graphs.errors import CaptureError, raised_line
from packgraph.graphs.exclusive import one_capture
from packgraph.graphs.gradients import GradientBuffers
from packgraph.graphs.output_gradients import KeyGradients
from packgraph.graphs.parameters import aliased_parameters, module_generators
from packgraph.graphs.program import Program
from packgraph.graphs.slots import Slot

_RETURN_GRADIENT = (
    "return the gradient from backward, and pass the parameter to the function as an input"
)
# What capturing user code may raise: torch reports illegal operations as RuntimeError, and code
# that meets a tensor where it expected a number raises one of the others. Anything else is not ours
# to interpret.
USER_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError)


@contextlib.contextmanager
def undone(
    module: torch.nn.Module,
    backend: Backend,
    effects: SideEffects | None = None,
    watched: bool = True,
) -> Iterator[Journal]:
    """Undo every effect on tensors, random generators and the module's Python state when the block
    ends.

    effects: of the module, if somebody else tells it where eager code runs. watched: whether calls
    of Python code are looked at, which slows compilers down. Raises CaptureError, after undoing
    all, when the block has changed Python state that a replay would not change.
    """
    with one_capture():
        yield from _undone(module, backend, effects or SideEffects(module), watched)


def _undone(
    module: torch.nn.Module, backend: Backend, effects: SideEffects, watched: bool
) -> Iterator[Journal]:
    journal = Journal()
    backend.extra_generators = module_generators(module)
    generators = backend.generators()
    collecting = gc.isenabled()
    gc.disable()
    torch.clear_autocast_cache()
    effects.begin(generators)
    with torch.no_grad():
        for buffer in effects.buffers():
            journal.before_write(buffer)
    journal.draws = effects.draws
    try:
        with (
            known_generators(generators),
            effects.draws.watching() if watched else contextlib.nullcontext(),
        ):
            yield journal
        effects.check()
    finally:
        effects.undo()
        torch.clear_autocast_cache()
        with torch.no_grad():
            journal.restore()
        if collecting:
            gc.enable()


def capture_variant(
    program: Program,
    backend: Backend,
    slot: Slot,
    buffers: GradientBuffers,
    gradients: KeyGradients,
    changed: Callable[[], object],
    calls: contextlib.AbstractContextManager[object],
    lends: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dry_run: DryRun,
    trial: bool = False,
) -> Variant:
    """Capture all regions of `program` for a call with these arguments into `slot`.

    gradients: what is known of the gradients of such calls. changed: whether facts about the module
    hold no longer that graphs bake. calls: entered around eager runs of the module. dry_run: of
    the same call. trial: whether the graphs are thrown away. Raises CaptureError; nothing has
    changed then.
    """
    effects = SideEffects(program.module, program.volatile, program.assigned)
    # The dry run has watched the calls of the same code; what effects a recording holds it must see
    # itself.
    quiet = contextlib.nullcontext() if dry_run.has_host_steps else unwatched()
    with (
        explained(),
        quiet,
        undone(program.module, backend, effects) as journal,
        aliased_parameters(program.module) as aliases,
        compiled_code(program.compiler is not None, fixed=True),
    ):
        watched = ObservedProgram(program, effects)
        backend.copy_streams.memories.let_go()
        with backend.window(slot.pool, slot.scratch, journal, trial) as window:
            build = VariantBuild(
                watched,
                program,
                slot,
                window,
                aliases,
                buffers,
                gradients,
                changed,
                calls,
                journal,
                lends,
                dry_run,
            )
            return build.capture(args, kwargs)


@contextlib.contextmanager
def compiled_code(there: bool, *, fixed: bool = False) -> Iterator[None]:
    """Within the block captured stages run as compiled code, if `there` is any. fixed: all of it
    was compiled before, and code that would have to be compiled now is an error, since a capture
    cannot hold that.
    """
    with contextlib.ExitStack() as stack:
        if there:
            stack.enter_context(compiled_stages(fixed))
        yield


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn whatever user code raises during a capture into a CaptureError at the user's line."""
    try:
        yield
    except CaptureError:
        raise
    except USER_ERRORS as error:
        what = str(error).strip().split("\n")[0] or type(error).__name__
        raise CaptureError(
            f"{type(error).__name__} while capturing: {what}",
            raised_line(error.__traceback__),
            FREE_MEMORY if is_out_of_memory(error) else LEAVE_OUT,
        ) from error
