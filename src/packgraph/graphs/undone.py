"""Reversal of the effects of code that is dry-run or captured, whether it fails or not.

These are writes to tensors that existed before (journal), states of random generators, of Python's
and numpy's too, of Python's garbage collector and of the autocast cache, the module's parameters
and attributes. What such code raises is told at the user's line (`explained`).
"""

import contextlib
import gc
from collections.abc import Iterator

import torch

from packgraph.graphs import fallback
from packgraph.graphs.backend import Backend
from packgraph.graphs.cache import FREE_MEMORY, is_out_of_memory
from packgraph.graphs.checks.host_sync import (
    LEAVE_OUT,
    Journal,
    known_generators,
)
from packgraph.graphs.checks.random_state import Draws
from packgraph.graphs.errors import USER_ERRORS, CaptureError, raised_line
from packgraph.graphs.parameters import module_generators
from packgraph.graphs.slots import one_capture


@contextlib.contextmanager
def undone(module: torch.nn.Module, backend: Backend) -> Iterator[Journal]:
    """Undo every effect on tensors, on torch's random generators and on attributes of the module
    when the block ends.

    Captured code is traced and has no other effects; attributes are those that eager stages assign.
    """
    with one_capture():
        journal = Journal()
        collecting = gc.isenabled()
        gc.disable()
        backend.extra_generators = module_generators(module)
        generators = backend.generators()
        torch.clear_autocast_cache()
        attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        draws = journal.draws = Draws(generators)
        with torch.no_grad():
            places = [(buffer, buffer.data) for buffer in module.buffers()]
            for buffer, _ in places:
                journal.before_write(buffer)
        try:
            with (
                fallback.eager(fallback.INSIDE),  # graphed modules inside run as they are
                known_generators(generators),
                draws.listening(),
            ):
                yield journal
        finally:
            for now, before in attributes:
                if len(now) != len(before) or any(
                    now.get(name) is not value for name, value in before.items()
                ):
                    now.clear()
                    now.update(before)
            draws.undo()
            torch.clear_autocast_cache()
            with torch.no_grad():
                journal.restore()
                for buffer, place in places:
                    if not buffer.is_set_to(place):
                        buffer.data = place
            if collecting:
                gc.enable()


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
