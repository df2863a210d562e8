"""The copy streams on the CPU: queues of copies that run when they must, or at once.

A copy on a real copy stream may happen at any time between two moments: when it is queued and what
it waits for is done, and when main waits for it. Tests run both extremes. A copy stream that is
`late` runs a copy only when main waits for it, or when a copy of the other copy stream waits for
it. A wait that is missing is then a wrong number: a late copy out reads memory that has been
reused, a late reload leaves NaN where main reads, an early reload reads host memory that nobody has
written.

    eager work      EmulatedLanes   queues as the program goes
    recorder        RecordedLanes   puts `queue` and `wait` into the recorded program; every replay
                                    has queues

What was reloaded is overwritten with NaN on the host, and targets of a reload when it is queued:
nobody may count on either.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from packgraph.graphs.copy_streams import (
    Copy,
    DeviceMemory,
    FreeHost,
    HostMemories,
    HostMemory,
    TimedCopy,
    placed,
)
from packgraph.torch_internals import below_modes

POISON = 0xFF


def plain(nbytes: int) -> torch.Tensor:
    """Host memory, uint8 [nbytes], full of NaN patterns; no part of what is recorded meanwhile."""
    with below_modes():
        return torch.full((nbytes,), POISON, dtype=torch.uint8)


class Queues:
    """Copies that have been queued and not run. late: copy streams whose copies wait until they
    must."""

    def __init__(self, late: Collection[str]) -> None:
        self.late = late
        self._queues: dict[str, deque[tuple[int, int | None, Callable[[], None]]]] = {
            "out": deque(),
            "back": deque(),
        }

    def add(
        self, copy_stream: str, number: int, after: int | None, run: Callable[[], None]
    ) -> None:
        """Queue copy `number`, which waits for copy `after`."""
        self._queues[copy_stream].append((number, after, run))
        if copy_stream not in self.late:
            self.finish(number)

    def finish(self, number: int) -> None:
        """Run what must have run when copy `number` is done."""
        for queue in self._queues.values():
            if any(entry[0] == number for entry in queue):
                while queue and queue[0][0] != number:
                    self._run(queue)
                self._run(queue)

    def drop(self) -> None:
        """Forget what has not run."""
        for queue in self._queues.values():
            queue.clear()

    def _run(self, queue: deque[tuple[int, int | None, Callable[[], None]]]) -> None:
        _, after, run = queue.popleft()
        if after is not None:
            self.finish(after)
        run()


def copy_out(sources: Sequence[torch.Tensor | None], places: Sequence[torch.Tensor]) -> None:
    """Copy to the host; of a source that is gone (None) NaN, as if something else were there
    now."""
    for source, place in zip(sources, places, strict=True):
        place.fill_(POISON) if source is None else place.copy_(source)


def copy_back(targets: Sequence[torch.Tensor | None], places: Sequence[torch.Tensor]) -> None:
    """Copy from the host, and overwrite what was there."""
    for target, place in zip(targets, places, strict=True):
        if target is not None:
            target.copy_(place)
        place.fill_(POISON)


class _Weak:
    """A tensor of bytes that does not keep its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._start, self._count = int(tensor.storage_offset()), tensor.numel()

    def tensor(self) -> torch.Tensor | None:
        """The tensor, None when its memory was given back."""
        storage = self._storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._start, (self._count,), (1,))


class EmulatedCopyStreams:
    """The copy streams of eager work on the CPU. late: copy streams whose copies run as late as
    they may, of `out` and `back`; `transfers` says the same of gathers and reductions."""

    def __init__(self, late: Collection[str] = ()) -> None:
        self.queues = Queues(late)
        self.memories = HostMemories(plain)
        self._free = FreeHost(self.memories)
        self._under_way: dict[int, Copy] = {}
        self.postponed: deque[Callable[[], None]] = deque()
        self._count, self.scope, self.replayed = 0, 0, set[int]()
        self.timed: list[TimedCopy] | None = None  # nothing comes into it: there is no device
        self.trial = False

    def host(self, nbytes: int) -> HostMemory:
        """See CopyStreams."""
        return self._free.take(nbytes)

    def give_back(self, host: HostMemory) -> None:
        """See CopyStreams."""
        self._free.give_back(host)

    def point(self) -> None:
        """See CopyStreams. Main has done what it has launched."""

    def out(self, sources: Sequence[torch.Tensor], host: HostMemory, since: Any = None) -> Copy:
        """See CopyStreams."""
        pieces, places = placed(host, sources)
        weak = [_Weak(piece) for piece in pieces]
        return self._queue(
            "out", host, list(sources), lambda: copy_out([w.tensor() for w in weak], places)
        )

    def back(self, host: HostMemory, targets: Sequence[torch.Tensor]) -> Copy:
        """See CopyStreams."""
        _unseen(lambda: [target.fill_(POISON) for target in targets])()
        pieces, places = placed(host, targets)
        weak = [_Weak(piece) for piece in pieces]
        return self._queue("back", host, [], lambda: copy_back([w.tensor() for w in weak], places))

    def _queue(
        self, copy_stream: str, host: HostMemory, held: list[torch.Tensor], run: Callable[[], None]
    ) -> Copy:
        self._count += 1
        after, host.last = host.last, Copy(copy_stream, self.scope, held, self._count)
        self._under_way[self._count] = host.last
        self.queues.add(
            copy_stream, self._count, None if after is None else after.native, _unseen(run)
        )
        return host.last

    def wait(self, copy: Copy) -> None:
        """See CopyStreams."""
        self.queues.finish(copy.native)
        copy.finish()
        self._under_way.pop(copy.native, None)

    def join(self) -> None:
        """See CopyStreams."""
        self.launched()
        for copy in list(self._under_way.values()):
            self.wait(copy)

    def postpone(self, launch: Callable[[], None]) -> None:
        """See CopyStreams."""
        self.postponed.append(launch)

    def launched(self) -> None:
        """See CopyStreams."""
        while self.postponed:
            self.postponed.popleft()()

    def clock(self) -> Any:
        """See CopyStreams."""
        return [time.perf_counter()]

    def elapsed_us(self, start: Any, end: Any) -> float:
        """See CopyStreams."""
        return 1e6 * (end[0] - start[0])

    def memory(self) -> DeviceMemory | None:
        """See CopyStreams."""
        return None


def _unseen(run: Callable[[], Any]) -> Callable[[], None]:
    """`run`, which nobody watches: a copy on a copy stream is no operation of the program."""

    def unseen() -> None:
        with below_modes(), torch.no_grad():
            run()

    return unseen


class Recorder(Protocol):
    """Part of a recorder's window that copy streams need."""

    def note(self, step: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
        """Put `step` into the program: it is called with the memory of `tensors` at every
        replay."""


class RecordedCopyStreams(EmulatedCopyStreams):
    """The copy streams of the captures of one window: they run at once while the program is
    recorded, and as told in replays.

    late: as above, looked at in every replay.
    """

    def __init__(self, window: Recorder, memories: HostMemories, late: Collection[str]) -> None:
        super().__init__()
        self.memories, self._free = memories, FreeHost(memories)
        self._window, self._replays = (
            weakref.proxy(window),
            Queues(late),
        )  # the window has its copy streams

    def out(self, sources: Sequence[torch.Tensor], host: HostMemory, since: Any = None) -> Copy:
        """See CopyStreams."""
        before, copy, (pieces, places) = (
            host.last,
            super().out(sources, host),
            placed(host, sources),
        )
        self._note(copy, before, pieces, lambda given: copy_out(given, places))
        return copy

    def back(self, host: HostMemory, targets: Sequence[torch.Tensor]) -> Copy:
        """See CopyStreams."""
        before, copy, (pieces, places) = (
            host.last,
            super().back(host, targets),
            placed(host, targets),
        )
        self._note(copy, before, pieces, lambda given: copy_back(given, places))
        return copy

    def _note(
        self,
        copy: Copy,
        before: Copy | None,
        tensors: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        after = None if before is None or before.scope != self.scope else before.native

        def queue(*given: torch.Tensor) -> None:
            for target in given if copy.copy_stream == "back" else ():
                target.fill_(POISON)
            self._replays.add(copy.copy_stream, copy.native, after, lambda: run(given))

        self._window.note(queue, tensors)

    def clock(self) -> Any:
        """See CopyStreams."""
        clock = super().clock()

        def read() -> None:
            clock[0] = time.perf_counter()

        self._window.note(read, [])
        return clock

    def wait(self, copy: Copy) -> None:
        """See CopyStreams."""
        if (
            not copy.done and copy.scope == self.scope
        ):  # those of earlier captures were joined there
            self._window.note(lambda: self._replays.finish(copy.native), [])
        super().wait(copy)
