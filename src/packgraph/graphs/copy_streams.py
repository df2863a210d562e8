"""Copies between device and host that run beside the captured or eager work: two copy streams, one
in each direction.

    main     | F0 | F1 | F2 ...            | B2 | B1 | B0 ...
    out           [0 -> host]                                        each copy waits for what main
                                                                     launched before it
    back                                   [host -> 0]

What orders a copy: everything that main has launched when it is queued; earlier copies of its copy
stream; and the last copy of its host memory, in whatever direction. So a reload never reads host
memory that is still being written, and host memory is never written while a reload still reads it.
What orders main is `wait` alone: until main has waited for a copy out, its sources stay allocated;
until main has waited for a copy back, its targets must not be read.

A capture has copy streams of its own (`captured_copy_streams`), made by its window and joined
before the capture ends: a copy that nobody has waited for is waited for there. Copies of a finished
capture, of the same window, need no waiting any more: their graph has ended when the next one
begins. Host memory that captured copies use belongs to the pool of the slot, and the graphs keep
it.
"""

import abc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from packgraph.graphs.fallback import within
from packgraph.torch_internals import below_modes

ALIGNMENT = 512
SMALLEST_ARENA, LARGEST_ARENA = 1 << 20, 1 << 30


@dataclass(eq=False)
class Copy:
    """One copy that was queued. copy_stream: `out` or `back`. scope: the capture it belongs to.
    held: its sources, until main has waited for it, or targets that nobody else has any more. done:
    whether main has. native: what the copy streams know it by. left: called when main has
    waited."""

    copy_stream: str
    scope: int
    held: list[torch.Tensor]
    native: Any = None
    done: bool = False
    left: Callable[[], None] | None = None

    def finish(self) -> None:
        """Main has waited: what was held is given back."""
        left, self.left = self.left, None
        self.done, self.held = True, []
        if left is not None:
            left()


@dataclass(eq=False)
class HostMemory:
    """Host memory of one group of tensors, pinned beside CUDA. spans: uint8 [n] each, n aligned,
    one behind the other. last: the last copy from or to it. number, arenas: of its buffer, which
    may grow, and what that was cut from."""

    spans: tuple[torch.Tensor, ...]
    last: Copy | None = field(default=None)
    number: int = 0
    arenas: "Arenas | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.numel() for span in self.spans)


class DeviceMemory(NamedTuple):
    """Bytes allocated on the device: now, and at the most since the last look."""

    now: int
    most: int


class TimedCopy(NamedTuple):
    """A copy of so many tensors, or pieces of them (`placed`), `nbytes` together, on `copy_stream`,
    and the times, for `elapsed_us`, at which it began and ended."""

    copy_stream: str
    nbytes: int
    tensors: int
    began: Any
    ended: Any


class CopyStreams(abc.ABC):
    """The copy streams of a device, or of one window.

    Attributes:
        scope: Number of the window's capture, 0 for eager work.
        replayed: The numbers of those captures that have been replayed.
        timed: Where a list, copies are timed into it (on a device).
        memories: What `host` is cut from.
        postponed: What waits for the next launch of a graph.
    """

    def __init__(self, memories: "HostMemories") -> None:
        self.memories, self._free = memories, FreeHost(memories)
        self._under_way: list[Copy] = []
        self.postponed = deque[Callable[[], None]]()
        self.scope, self.replayed = 0, set[int]()
        self.timed: list[TimedCopy] | None = None

    def host(self, nbytes: int) -> HostMemory:
        """Host memory of at least `nbytes` that nobody else uses until `give_back`."""
        return self._free.take(nbytes)

    def give_back(self, host: HostMemory) -> None:
        """Others may use this host memory now: their copies wait for its last one."""
        self._free.give_back(host)

    def point(self) -> Any:
        """Marks the work that main has launched so far, for `out`; None where that is done."""
        return None

    def out(self, sources: Sequence[torch.Tensor], host: HostMemory, since: Any = None) -> Copy:
        """Queue a copy of `sources` (uint8 [n] each) to the host, one behind the other. since: a
        `point`, None = now."""
        return self._queued("out", sources, host, list(sources), since)

    def back(self, host: HostMemory, targets: Sequence[torch.Tensor]) -> Copy:
        """Queue the reload of what `out` has copied into tensors of the same sizes, allocated on
        main."""
        return self._queued("back", targets, host, [], None)

    def _queued(
        self,
        copy_stream: str,
        tensors: Sequence[torch.Tensor],
        host: HostMemory,
        held: list[torch.Tensor],
        since: Any,
    ) -> Copy:
        native = self._queue(copy_stream, *placed(host, tensors), host.last, since)
        host.last = Copy(copy_stream, self.scope, held, native)
        self._under_way.append(host.last)
        return host.last

    @abc.abstractmethod
    def _queue(
        self,
        copy_stream: str,
        pieces: list[torch.Tensor],
        places: list[torch.Tensor],
        before: Copy | None,
        since: Any,
    ) -> Any:
        """Queues a copy between `pieces` of tensors and their places in host memory, whose last
        copy is `before`; returns what `_wait` needs."""

    def wait(self, copy: Copy) -> None:
        """Main goes on when `copy` is done; its sources are given back."""
        self._wait(copy)
        copy.finish()
        self._under_way = [other for other in self._under_way if other is not copy]

    @abc.abstractmethod
    def _wait(self, copy: Copy) -> None:
        """Has main wait for `copy`, if that is needed."""

    def join(self) -> None:
        """Main waits for all copies."""
        self.launched()
        for copy in list(self._under_way):
            self.wait(copy)

    def postpone(self, launch: Callable[[], None]) -> None:
        """Call `launch` once the next graph was launched, or at `launched`."""
        self.postponed.append(launch)

    def launched(self) -> None:
        """A graph was launched: run what was postponed."""
        while self.postponed:
            self.postponed.popleft()()

    @abc.abstractmethod
    def clock(self) -> Any:
        """The time at which main gets here, for `elapsed_us`; of a capture, in its last replay."""

    @abc.abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two times; waits for the device."""

    def memory(self) -> DeviceMemory | None:
        """A look at the device's allocator, whose peak statistics begin anew by it; None where
        nobody counts."""
        return None


_CAPTURED: ContextVar[CopyStreams | None] = ContextVar("packgraph_captured_lanes", default=None)


def captured_copy_streams() -> CopyStreams | None:
    """The copy streams of the capture that the caller's code is run for; None when none is under
    way."""
    return _CAPTURED.get()


def capturing_copy_streams(copy_streams: CopyStreams) -> AbstractContextManager[None]:
    """Within the block `captured_copy_streams` returns `copy_streams`."""
    return within(_CAPTURED, copy_streams)


def placed(
    host: HostMemory, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`tensors` (uint8 [n] each), cut where a span ends, and the places of what that makes of them
    in host memory."""
    pieces, places = list[torch.Tensor](), list[torch.Tensor]()
    number = used = 0  # the span, and bytes of it
    for tensor in tensors:
        start, count = 0, tensor.numel()
        while start < count:
            span = host.spans[number]
            taken = min(count - start, span.numel() - used)
            pieces.append(tensor if taken == count else _cut(tensor, start, taken))
            places.append(_cut(span, used, taken))
            start, used = start + taken, used + aligned(taken)
            if used == span.numel():
                number, used = number + 1, 0
    return pieces, places


def _cut(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """A part of `memory`. Nobody sees it cut: who watches what captured code reads would keep host
    memory for the graphs."""
    with below_modes():
        return memory[start : start + nbytes]


def aligned(nbytes: int) -> int:
    """Bytes that `nbytes` take in host memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arenas:
    """Host memory cut from large pieces, which double in size up to a limit: pinned memory is slow
    to make, and torch rounds it to powers of two. Who takes more than a piece has left gets the
    rest from the next, so that no more than a part of the last one is unused, however large groups
    are. make: a piece of that many bytes."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self.pieces: list[torch.Tensor] = []
        self._left = 0  # bytes of the last piece

    def take(self, nbytes: int) -> Iterator[torch.Tensor]:
        """uint8 spans that nobody else has, `nbytes` together, which are aligned. One by one: of
        what was taken before a piece cannot be had nothing is lost."""
        while nbytes > 0:
            if not self._left:
                self._add(nbytes)
            piece, taken = self.pieces[-1], min(nbytes, self._left)
            start = piece.numel() - self._left
            self._left, nbytes = self._left - taken, nbytes - taken
            yield _cut(piece, start, taken)

    def _add(self, wanted: int) -> None:
        size = max(
            2 * self.pieces[-1].numel() if self.pieces else SMALLEST_ARENA,
            1 << (wanted - 1).bit_length(),
        )
        self.pieces.append(self._make(min(size, LARGEST_ARENA)))
        self._left = self.pieces[-1].numel()

    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.numel() for piece in self.pieces)

    def poison(self) -> None:
        """Overwrite everything with NaN patterns (tests)."""
        for piece in self.pieces:
            piece.fill_(0xFF)


class HostMemories:
    """Host memory of a slot, or of eager work. Buffers are numbered in the order in which a variant
    takes them, so that the variants of a slot, which exclude each other, share them. takers: of all
    variants, which may outlive the slot. is_trial: whether the slot's graphs are thrown away, so
    that nobody will ask for times of their replays.
    """

    is_trial = False

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self.takers: weakref.WeakSet[FreeHost] = weakref.WeakSet()
        self.let_go()

    def let_go(self) -> None:
        """Begin anew: of a slot, when its graphs are gone; of eager work, when a capture is about
        to begin, which then gets what earlier passes had. Who has host memory keeps it."""
        self.arenas = Arenas(self._make)
        self._buffers: list[tuple[torch.Tensor, ...]] = []
        for taker in self.takers:
            taker.forget()

    def number(self, number: int, nbytes: int) -> tuple[torch.Tensor, ...]:
        """The spans of buffer `number`, which grows to `nbytes` at least."""
        while len(self._buffers) <= number:
            self._buffers.append(())
        missing = aligned(nbytes) - sum(span.numel() for span in self._buffers[number])
        for span in self.arenas.take(missing):
            self._buffers[number] += (span,)
        return self._buffers[number]


class FreeHost:
    """Free host memory, given out as the smallest buffer that is large enough, else the largest,
    which grows, else the next number of `memories`."""

    def __init__(self, memories: HostMemories) -> None:
        self.memories = memories
        self.forget()
        memories.takers.add(self)

    def forget(self) -> None:
        """Take new host memory from now on."""
        self._free: list[HostMemory] = []
        self._taken = 0

    def take(self, nbytes: int) -> HostMemory:
        """Host memory of at least `nbytes`."""
        # What was taken before `let_go` has its number no more, so it cannot grow.
        usable = [
            host
            for host in self._free
            if host.nbytes >= nbytes or host.arenas is self.memories.arenas
        ]
        if usable:
            found = min(usable, key=lambda host: (host.nbytes < nbytes, abs(host.nbytes - nbytes)))
            if found.nbytes < nbytes:
                found.spans = self.memories.number(found.number, nbytes)
            self._free = [host for host in self._free if host is not found]
            return found
        self._taken += 1
        spans = self.memories.number(self._taken - 1, nbytes)
        return HostMemory(spans, number=self._taken - 1, arenas=self.memories.arenas)

    def give_back(self, host: HostMemory) -> None:
        """Let the next one have it."""
        self._free.append(host)
