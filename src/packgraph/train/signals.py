"""Ctrl-C and SIGTERM: finish the step, then stop.

The handler only notes the signal, so no state is ever half-written; a second Ctrl-C stops at once. The previous
handlers come back at the end, and outside of the main thread (where Python allows no handlers) nothing is installed.
"""
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether and why a run should stop after its current step. `reason` is a signal's name or empty."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler."""
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block SIGINT and SIGTERM set the yielded request instead of interrupting."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, request.note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
