"""The copy streams on the CPU: queues of copies that run when they must, or at once.

A copy on a real copy stream may happen at any time between two moments: when it is queued and what
it waits for is done, and when main waits for it. Tests run both extremes. A copy stream that is
`late` runs a copy only when main waits for it, or when a copy of the other copy stream waits for
it. A wait that is missing is then a wrong number: a late copy out reads memory that has been
reused, a late reload leaves NaN where main reads, an early reload reads host memory that nobody has
written.

    eager work      EmulatedCopyStreams   queues as the program goes
    recorder        RecordedCopyStreams   puts `queue` and `wait` into the recorded program; every
                                          replay has queues

What was reloaded is overwritten with NaN on the host, and targets of a reload when it is queued:
nobody may count on either.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from packgraph.graphs.copy_streams import (
    Copy,
    CopyStreams,
    HostMemories,
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

    def _run(self, queue: deque[tuple[int, int | None, Callable[[], None]]]) -> None:
        _, after, run = queue.popleft()
        if after is not None:
            self.finish(after)
        run()


def move(
    copy_stream: str, tensors: Sequence[torch.Tensor | None], places: Sequence[torch.Tensor]
) -> None:
    """Copies to the host: of what is gone (None) NaN, as if something else were there now. Or from
    it, and overwrites what was there."""
    for tensor, place in zip(tensors, places, strict=True):
        if copy_stream == "out" and tensor is not None:
            place.copy_(tensor)
            continue
        if tensor is not None:
            tensor.copy_(place)
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


class EmulatedCopyStreams(CopyStreams):
    """The copy streams of eager work on the CPU. late: copy streams whose copies run as late as
    they may, of `out` and `back`; `transfers` says the same of gathers and reductions. memories:
    None = of its own."""

    def __init__(self, late: Collection[str] = (), memories: HostMemories | None = None) -> None:
        super().__init__(memories or HostMemories(plain))
        self.queues, self._count = Queues(late), 0

    def _queue(
        self,
        copy_stream: str,
        pieces: list[torch.Tensor],
        places: list[torch.Tensor],
        before: Copy | None,
        since: Any,
    ) -> int:
        weak = [_Weak(piece) for piece in pieces]
        if copy_stream == "back":
            _unseen(lambda: [piece.fill_(POISON) for piece in pieces])()
        self._count += 1
        run = _unseen(lambda: move(copy_stream, [each.tensor() for each in weak], places))
        self.queues.add(copy_stream, self._count, None if before is None else before.native, run)
        return self._count

    def _wait(self, copy: Copy) -> None:
        self.queues.finish(copy.native)

    def clock(self) -> Any:
        """See CopyStreams."""
        return [time.perf_counter()]

    def elapsed_us(self, start: Any, end: Any) -> float:
        """See CopyStreams."""
        return 1e6 * (end[0] - start[0])


def _unseen(run: Callable[[], Any]) -> Callable[[], None]:
    """`run`, which nobody watches: a copy on a copy stream is no operation of the program."""

    def unseen() -> None:
        with below_modes(), torch.no_grad():
            run()

    return unseen


class RecordedCopyStreams(EmulatedCopyStreams):
    """The copy streams of the captures of one window: they run at once while the program is
    recorded, and as told in replays.

    window: the recorder's, which notes what every replay has to do. late: as above, looked at in
    every replay.
    """

    def __init__(self, window: Any, memories: HostMemories, late: Collection[str]) -> None:
        super().__init__(memories=memories)
        self._window, self._replays = weakref.proxy(window), Queues(late)  # the window has these

    def _queue(
        self,
        copy_stream: str,
        pieces: list[torch.Tensor],
        places: list[torch.Tensor],
        before: Copy | None,
        since: Any,
    ) -> int:
        number = super()._queue(copy_stream, pieces, places, before, since)
        after = None if before is None or before.scope != self.scope else before.native

        def queue(*given: torch.Tensor) -> None:
            for target in given if copy_stream == "back" else ():
                target.fill_(POISON)
            self._replays.add(copy_stream, number, after, lambda: move(copy_stream, given, places))

        self._window.note(queue, pieces)
        return number

    def clock(self) -> Any:
        """See CopyStreams."""
        clock = super().clock()

        def read() -> None:
            clock[0] = time.perf_counter()

        self._window.note(read, [])
        return clock

    def _wait(self, copy: Copy) -> None:
        # Those of earlier captures were joined there.
        if not copy.done and copy.scope == self.scope:
            self._window.note(lambda: self._replays.finish(copy.native), [])
        super()._wait(copy)
