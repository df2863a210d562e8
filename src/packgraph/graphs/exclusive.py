"""Threads that share a graphed module: who may launch, who may call, and who may capture.

    launches   copy in, replay, clone out      one thread at a time: slots share memory for
                                               backwards
    calls      a call of the module            any number of threads, but none while the module is
                                               captured
    captures   dry run, capture, undo          one in the process, when no thread is inside the
                                               module

Locks are taken in the order captures, calls, launches. A launch only queues work (on the CPU:
computes) and calls neither user code nor the autograd engine, so whoever waits for it waits for a
moment. A capture runs user code and the engine. On CUDA backwards of all threads run in one thread
of the engine, which the capture needs too: there a capture does not hold up launches (it executes
nothing in memory that slots share), and a backward never waits for a capture. Nor could one that
runs its forward again, so the capture waits for the backwards of other threads before it begins.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

LONGEST_WAIT_S = (
    10.0  # for other threads to leave the module before a capture; then the call runs eagerly
)
LONGEST_WAIT_FOR_BACKWARDS_S = (
    2.0  # of other threads; then the capture begins, since they may wait for this thread
)
_LOOK_S = 0.001  # for slots given back, of which nobody tells


class _Captures:
    """The one capture of the process. thread: which has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.thread: int | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Wait for those of other modules. A capture may begin within a capture of the same
        thread."""
        with self._lock:
            before, self.thread = self.thread, threading.get_ident()
            try:
                yield
            finally:
                self.thread = before


_CAPTURES = _Captures()
one_capture = _CAPTURES.one


class Launches:
    """Exclusive use of what the slots of a module share: memory of backwards, and gradient buffers.

    shared: several threads train with the module. It is set within the lock and stays: what a
    backward does because it is not set, it does within the same `with launches:`. There the current
    stream follows the stream of the launches before: what shares memory must not overlap on the
    device either.
    """

    def __init__(self, device: torch.device) -> None:
        self.shared = False
        self._lock = threading.RLock()
        self._index = None
        if device.type == "cuda":
            self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream: torch.cuda.Stream | None = None
        self._number: int | None = None

    def __enter__(self) -> "Launches":
        self._lock.acquire()
        if (
            self._index is not None
            and torch._C._cuda_getCurrentRawStream(self._index) != self._number
        ):
            self._follow()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def share(self) -> None:
        """From now on several threads train with the module."""
        with self:
            self.shared = True

    @contextlib.contextmanager
    def during_capture(self, executes: bool) -> Iterator[None]:
        """Around a capture, whose stream follows, too. executes: in memory that slots share, so
        launches must wait."""
        with self:
            if executes:
                yield
                return
        yield

    def _follow(self) -> None:
        """Let the current stream wait for all that was launched on the last one."""
        try:
            stream = torch.cuda.current_stream(self._index)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._number = stream, stream.cuda_stream
        except BaseException:
            self._lock.release()
            raise


class Calls:
    """The threads inside a module, and the one that captures it: `with calls:` around every call.

    device: of the module. shared: whether a thread has come in to train while another one that does
    lived. elsewhere: tells whether microbatches of other threads than the current one wait for
    their backwards.
    """

    def __init__(self, device: torch.device, elsewhere: Callable[[], bool]) -> None:
        self.shared = False
        self._cuda = device.type == "cuda"
        self._elsewhere = elsewhere
        self._begun = False
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}
        self._capturer: int | None = None
        self._trainer: int | None = None

    def __enter__(self) -> "Calls":
        thread = threading.get_ident()
        with self._lock:
            if self._capturer is not None and not self._may_enter(thread):
                self._refuse_in_engine()
                self._turn.wait_for(lambda: self._may_enter(thread))
            self._inside[thread] = self._inside.get(thread, 0) + 1
        if thread != self._trainer and not self.shared and torch.is_grad_enabled():
            self._another(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        thread = threading.get_ident()
        with self._lock:
            count = self._inside.pop(thread) - 1
            if count:
                self._inside[thread] = count
            elif self._capturer is not None:
                self._turn.notify_all()

    def _may_enter(self, thread: int) -> bool:
        """A thread in the capture of another module may: this module's capture has not begun then.
        So may a backward that the capture waits for."""
        return (
            self._capturer in (None, thread)
            or _CAPTURES.thread == thread
            or (not self._begun and self._in_engine())
        )

    def _another(self, thread: int) -> None:
        """A thread trains that is not the one before. One after another is as one: the first must
        live."""
        with self._lock:
            before, self._trainer = self._trainer, thread
            lives = before is not None and any(
                other.ident == before for other in threading.enumerate()
            )
            self.shared = self.shared or lives

    def may_capture(self) -> bool:
        """Whether this thread is within `capture`."""
        return self._capturer == threading.get_ident()

    @contextlib.contextmanager
    def capture(self) -> Iterator[bool]:
        """Within the block no other thread is inside the module, and none captures another one.
        Gives False, and excludes nobody, when they do not leave in time. The caller runs no code of
        the module when this begins."""
        thread = threading.get_ident()
        if self._capturer == thread:
            yield True
            return
        own, free = 0, False
        try:
            with self._lock:
                own = self._inside.pop(thread, 0)
                free = self._close(thread, 0.0 if self._in_engine() else LONGEST_WAIT_S)
            if free:
                with one_capture():
                    yield True
            else:
                yield False
        finally:
            with self._lock:
                if own:
                    self._inside[thread] = own
                if free:
                    self._capturer, self._begun = None, False
                self._turn.notify_all()

    def _close(self, thread: int, seconds: float) -> bool:
        """Let nobody in, and wait for those inside."""
        self._turn.notify_all()
        if not self._turn.wait_for(lambda: self._capturer is None, seconds):
            return False
        self._capturer = thread
        try:
            if self._cuda and seconds:
                self._wait_for_backwards()
            self._begun = self._turn.wait_for(lambda: not self._inside, seconds)
        finally:  # Ctrl-C, too
            if not self._begun:
                self._capturer = None
        return self._begun

    def _wait_for_backwards(self) -> None:
        """Other threads' ones, which may have to run their forward again."""
        until = time.monotonic() + LONGEST_WAIT_FOR_BACKWARDS_S
        while self._elsewhere() and time.monotonic() < until:
            self._turn.wait(_LOOK_S)

    def _in_engine(self) -> bool:
        """Whether this is the thread that runs all backwards of the device: a capture of any thread
        needs it."""
        return self._cuda and torch._C._current_graph_task_id() != -1

    def _refuse_in_engine(self) -> None:
        if self._in_engine():
            raise RuntimeError(
                "a backward calls a graphed module again (recomputation) while another thread "
                "captures "
                "graphs of it: let one thread call the module alone until its graphs are captured"
            )
