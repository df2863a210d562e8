"""Effects on the host that pass by torch's dispatcher, put into a recorded program.

Recomputation moves the default generator back and forth by `torch.get_rng_state` and
`torch.set_rng_state`, and code that communicates waits for its transfers. Both must happen at every
replay, at their place. Resizing a storage, or moving a generator in another way, cannot be recorded
and is refused.

Calls are seen in the recording thread alone (graphs/checks/host_calls.py). The wait of a transfer
is the exception: what Python tells of a call is the function and not the object. `dist.Work.wait`
is therefore replaced, once and for good when a transfer is first recorded, by a function that
passes everything on, unless its thread is recording.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from packgraph.graphs.checks.host_calls import SeesBuiltin, SeesFunction, Watcher, watched_calls
from packgraph.graphs.checks.host_sync import LEAVE_OUT
from packgraph.graphs.errors import CaptureError, is_user_file, user_line

_BY_FUNCTIONS = (
    "move the default generator by torch.get_rng_state and torch.set_rng_state. " + LEAVE_OUT
)
_RECORDED: ContextVar[Callable[[Any], None] | None] = ContextVar(
    "packgraph_recorded_wait", default=None
)


class RecordedHost(Watcher):
    """Shows the host's steps of one recording. step: is given what a replay has to do, in order."""

    def __init__(self, step: Callable[[Callable[[], Any]], None]) -> None:
        self._step = step

    def builtins(self) -> Mapping[str, SeesBuiltin]:
        """See Watcher."""
        return {
            "resize_": self._resized,
            **dict.fromkeys(("get_state", "set_state", "get_offset", "set_offset"), self._moved),
        }

    def functions(self) -> Mapping[CodeType, SeesFunction]:
        """See Watcher."""
        return {
            torch.random.get_rng_state.__code__: self._read,
            torch.random.set_rng_state.__code__: self._set,
        }

    def _read(self, frame: FrameType, state: Any, done: bool) -> None:
        if isinstance(state, torch.Tensor):
            self._step(lambda: state.copy_(torch.default_generator.get_state()))

    def _set(self, frame: FrameType, result: Any, done: bool) -> None:
        if not done:
            state = frame.f_locals["new_state"]
            self._step(lambda: torch.default_generator.set_state(state))

    def _resized(self, frame: FrameType, function: Any, done: bool) -> None:
        if isinstance(function.__self__, torch.UntypedStorage):
            raise CaptureError(
                "a storage is resized inside a captured stage (FSDP does this)",
                user_line(frame),
                LEAVE_OUT,
            )

    def _moved(self, frame: FrameType, function: Any, done: bool) -> None:
        if isinstance(function.__self__, torch.Generator) and is_user_file(
            frame.f_code.co_filename
        ):
            raise CaptureError(
                f"Generator.{function.__name__}() inside a captured stage: a replay would not do "
                "it",
                user_line(frame),
                _BY_FUNCTIONS,
            )


@contextlib.contextmanager
def recorded_host(
    step: Callable[[Callable[[], Any]], None], waited: Callable[[Any], None]
) -> Iterator[None]:
    """Within the block effects of this thread are told: `step` what a replay has to do, `waited`
    for which transfer."""
    token = _RECORDED.set(waited)
    try:
        with watched_calls(RecordedHost(step)):
            yield
    finally:
        _RECORDED.reset(token)


def tell_waits() -> None:
    """From now on a recording thread is told of transfers that it waits for."""
    original = dist.Work.wait
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        waited = _RECORDED.get()
        if waited is None:
            return original(work, *args, **kwargs)
        waited(work)
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            return original(work, *args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
