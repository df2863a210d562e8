"""Ends: of a run by signals and time limits, and of work in a thread.

A run that is asked to stop finishes the step, saves, and stops with an exit code that a scheduler
understands.

    SIGINT (Ctrl-C)      130     after any signal: at once
    SIGTERM              143     the end of a job
    SIGUSR1, SIGXCPU     138, 152     a job's time is nearly over (Slurm's --signal=USR1@120)
    SIGHUP               129     the terminal is gone
    run.max_minutes      75      "try again later" (EX_TEMPFAIL of sysexits.h): requeue on it

The handler only notes the signal, so no state is ever half-written. The previous handlers come back
at the end, and outside of the main thread (where Python allows no handlers) nothing is installed.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Outcome:
    """Takes the error that ends its block, of whatever kind, for another thread.

    Attributes:
        error: That error, None where there was none.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        return True


TIME_IS_UP = 75
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
_SAME_LIMIT = 60.0  # seconds between the clocks of processes that were started together


class StopRequest:
    """Request to stop a run after its current step, and its reason.

    Attributes:
        reason: A signal's name, or the time limit; empty = nobody has asked.
        code: The exit code that tells it; 0 = nobody has asked.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        """max_minutes: from now on; None = no limit."""
        self.reason, self.code = "", 0
        self._limit = max_minutes
        self._end = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    def __bool__(self) -> bool:
        return self.has_come()

    def has_come(self) -> bool:
        """Tells whether anybody has asked, also between two looks for it after a step."""
        if not self.reason and self._end is not None and time.monotonic() > self._end:
            self.reason, self.code = f"run.max_minutes = {self._limit:g}", TIME_IS_UP
        return bool(self.reason)

    def exit_code(self) -> int:
        """The exit code of a process that stops, because it was asked to or because another one of
        the run was."""
        if self.code:
            return self.code
        near = self._end is not None and time.monotonic() > self._end - _SAME_LIMIT
        return TIME_IS_UP if near else 128 + signal.SIGTERM

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler."""
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason, self.code = signal.Signals(number).name, 128 + number


@contextmanager
def stop_on_signals(max_minutes: float | None = None) -> Iterator[StopRequest]:
    """Within the block signals set the yielded request instead of interrupting; those that are
    ignored stay so."""
    request = StopRequest(max_minutes)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, request.note) for number in heeded}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
