"""Copies between device and host that run beside the captured or eager work: two lanes, one in each direction.

    main     | F0 | F1 | F2 ...            | B2 | B1 | B0 ...
    out           [0 -> host]                                        each copy waits for what main launched before it
    back                                   [host -> 0]

What orders a copy: everything that main has launched when it is queued; earlier copies of its lane; and the last copy
of its host memory, in whatever direction. So a reload never reads host memory that is still being written, and host
memory is never written while a reload still reads it. What orders main is `wait` alone: until main has waited for a
copy out, its sources stay allocated; until main has waited for a copy back, its targets must not be read.

A capture has lanes of its own (`captured_lanes`), made by its window and joined before the capture ends: a copy that
nobody has waited for is waited for there. Copies of a finished capture, of the same window, need no waiting any more:
their graph has ended when the next one begins. Host memory that captured copies use belongs to the pool of the slot,
and the graphs keep it.
"""
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

ALIGNMENT = 512
SMALLEST_ARENA, LARGEST_ARENA = 1 << 20, 1 << 30


@dataclass(eq=False)
class Copy:
    """One copy that was queued. lane: `out` or `back`. scope: the capture it belongs to. held: its sources, until main
    has waited for it. done: whether main has. native: what the lanes know it by."""

    lane: str
    scope: int
    held: list[torch.Tensor]
    native: Any = None
    done: bool = False


@dataclass(eq=False)
class HostMemory:
    """Host memory of one group of tensors, uint8 [nbytes], pinned beside CUDA. last: the last copy from or to it."""

    memory: torch.Tensor
    last: Copy | None = field(default=None)


class DeviceMemory(NamedTuple):
    """Bytes allocated on the device: now, and at the most since the last look."""

    now: int
    most: int


class TimedCopy(NamedTuple):
    """A copy of so many tensors, `nbytes` together, on `lane`, and the times, for `elapsed_us`, at which it began and
    ended."""

    lane: str
    nbytes: int
    tensors: int
    began: Any
    ended: Any


class Lanes(Protocol):
    """The lanes of a device, or of one window. scope: number of the window's capture, 0 for eager work. replayed: the
    numbers of those captures that have been replayed. timed: where a list, copies are timed into it (on a device).
    trial: whether the window's graphs are thrown away, so that nobody will ask for times of their replays. memories:
    what `host` is cut from."""

    scope: int
    replayed: set[int]
    timed: list[TimedCopy] | None
    trial: bool
    memories: "HostMemories"

    def host(self, nbytes: int) -> HostMemory:
        """Host memory of at least `nbytes` that nobody else uses until `give_back`."""

    def give_back(self, host: HostMemory) -> None:
        """Others may use this host memory now: their copies wait for its last one."""

    def point(self) -> Any:
        """What main has launched so far, for `out`."""

    def out(self, sources: Sequence[torch.Tensor], host: HostMemory, since: Any = None) -> Copy:
        """Queue a copy of `sources` (uint8 [n] each) to the host, one behind the other. since: a `point`, None = now.
        """

    def back(self, host: HostMemory, targets: Sequence[torch.Tensor]) -> Copy:
        """Queue the reload of what `out` has copied into tensors of the same sizes, allocated on main."""

    def wait(self, copy: Copy) -> None:
        """Main goes on when `copy` is done; its sources are given back."""

    def join(self) -> None:
        """Main waits for all copies."""

    def postpone(self, launch: Callable[[], None]) -> None:
        """Call `launch` once the next graph was launched, or at `launched`."""

    def launched(self) -> None:
        """A graph was launched: run what was postponed."""

    def clock(self) -> Any:
        """The time at which main gets here, for `elapsed_us`; of a capture, in its last replay."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two times; waits for the device."""

    def memory(self) -> DeviceMemory | None:
        """A look at the device's allocator, whose peak statistics begin anew by it; None where nobody counts."""


_CAPTURED: ContextVar[Lanes | None] = ContextVar("packgraph_captured_lanes", default=None)


def captured_lanes() -> Lanes | None:
    """The lanes of the capture that the caller's code is run for; None when none is under way."""
    return _CAPTURED.get()


@contextlib.contextmanager
def capturing_lanes(lanes: Lanes) -> Iterator[None]:
    """Within the block `captured_lanes` returns `lanes`."""
    token = _CAPTURED.set(lanes)
    try:
        yield
    finally:
        _CAPTURED.reset(token)


def parts(host: HostMemory, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The places of `tensors` (uint8 [n]) in host memory, one behind the other."""
    found, start = [], 0
    for tensor in tensors:
        found.append(_cut(host.memory, start, tensor.numel()))
        start += aligned(tensor.numel())
    return found


def _cut(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """A part of host memory. Nobody sees it cut: who watches what captured code reads would keep it for the graphs."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return memory[start : start + nbytes]


def aligned(nbytes: int) -> int:
    """Bytes that `nbytes` take in host memory."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arenas:
    """Host memory cut from large pieces, which double in size: pinned memory is slow to make, and torch rounds it to
    powers of two (unless told otherwise), so what one piece has left goes to whoever fits. make: a piece of that many
    bytes."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self.pieces: list[torch.Tensor] = []
        self._used: list[int] = []  # bytes of each piece

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] that nobody else has, of the oldest piece that has so much left."""
        place = next((place for place, (piece, used) in enumerate(zip(self.pieces, self._used))
                      if used + nbytes <= piece.numel()), len(self.pieces))
        if place == len(self.pieces):
            size = max((2 * piece.numel() for piece in self.pieces), default=SMALLEST_ARENA)
            self.pieces.append(self._make(max(min(size, LARGEST_ARENA), 1 << (nbytes - 1).bit_length())))
            self._used.append(0)
        start = self._used[place]
        self._used[place] += aligned(nbytes)
        return _cut(self.pieces[place], start, nbytes)

    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.numel() for piece in self.pieces)

    def poison(self) -> None:
        """Overwrite everything with NaN patterns (tests)."""
        for piece in self.pieces:
            piece.fill_(0xFF)


class HostMemories:
    """Host memory of a slot, or of eager work. Buffers are numbered in the order in which a variant takes them, so that
    the variants of a slot, which exclude each other, share them. takers: of all variants, which may outlive the slot.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self.takers: weakref.WeakSet[FreeHost] = weakref.WeakSet()
        self.let_go()

    def let_go(self) -> None:
        """Begin anew: of a slot, when its graphs are gone; of eager work, when a capture is about to begin, which then
        gets what earlier passes had. Who has host memory keeps it."""
        self.arenas = Arenas(self._make)
        self._buffers: list[torch.Tensor] = []
        for taker in self.takers:
            taker.forget()

    def number(self, number: int, nbytes: int) -> torch.Tensor:
        """Buffer `number`, with at least `nbytes`; a larger one takes the place of one that is too small."""
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].numel() < nbytes:
            self._buffers[number] = self.arenas.take(aligned(nbytes))
        return self._buffers[number]


class FreeHost:
    """Who takes host memory now: the smallest free buffer that is large enough, else the next number of `memories`."""

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
        fitting = [host for host in self._free if host.memory.numel() >= nbytes]
        if fitting:
            found = min(fitting, key=lambda host: host.memory.numel())
            self._free = [host for host in self._free if host is not found]
            return found
        self._taken += 1
        return HostMemory(self.memories.number(self._taken - 1, nbytes))

    def give_back(self, host: HostMemory) -> None:
        """Let the next one have it."""
        self._free.append(host)
