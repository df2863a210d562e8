"""What a pass was seen to do, for plans: bytes of its groups, and when main came to their forwards and backwards.

Plans are to know about compute alone. Where groups moved meanwhile main has waited for copies, so its waits are timed,
too, and taken out:

    main   | F0 | F1 |wait| F2 |        a clock at every bar
                                        F2 is made after F0 + F1 + F2

Bytes of groups that are on the device are counted beside, for `room.py`: a group's from its commit on, without those
whose copies main has waited for, and those that come back until the next backward begins.
"""
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from packgraph.graphs.lanes import Copy, Lanes
from packgraph.offload.group import Group
from packgraph.offload.room import Room
from packgraph.plan.offload.plan import OffloadGroup, OffloadTrace


class Mark(NamedTuple):
    """A time at which main got somewhere, and how many waits it had behind it."""

    clock: Any
    waits: int


class Waits:
    """The waits of main, in order: when they began and ended."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.all: list[tuple[Any, Any]] = []

    def wait(self, copy: Copy) -> None:
        """Let main wait for a copy, between two clocks."""
        began = self._lanes.clock()
        self._lanes.wait(copy)
        self.all.append((began, self._lanes.clock()))

    def mark(self) -> Mark:
        """Main gets here."""
        return Mark(self._lanes.clock(), len(self.all))


class PassTimes:
    """The times of one eager pass, by order of its groups."""

    def __init__(self, lanes: Lanes, waits: Waits) -> None:
        self.lanes, self.waits, self.started = lanes, waits, waits.mark()
        self.made: list[tuple[str, int, int, int, Mark]] = []  # name, layer, bytes, copies, time
        self.needed: dict[int, Mark] = {}
        self.room, self._held, self._running = Room(lanes), 0, 0
        self._passed = 0
        self._leaving: deque[tuple[weakref.ref[Group], int]] = deque()

    def committed(self, group: Group) -> None:
        """The next group is made."""
        self.made.append((group.name, group.layer, group.eligible_bytes, group.eligible_copies, self.waits.mark()))
        self._held += group.eligible_bytes
        if group.host is not None:
            self._leaving.append((weakref.ref(group), group.eligible_bytes))
        self.room.made(self._held)  # with what main has waited for since the block was opened: it was there until then
        self._given_back()

    def reached(self, group: Group, reloads: Sequence[Group]) -> None:
        """Backward has come to `group`; `reloads` begin now."""
        self.needed.setdefault(group.order, self.waits.mark())
        self._given_back()
        before = self._held = self._held - self._running
        self._passed += self._running
        self._held += sum(other.eligible_bytes for other in reloads)
        self._running = group.eligible_bytes
        self.room.reached(before, self._held, self._passed)

    def _given_back(self) -> None:
        while self._leaving:
            group, nbytes = self._leaving[0][0](), self._leaving[0][1]
            if group is not None and (group.copy_out is None or not group.copy_out.done):
                break
            self._leaving.popleft()
            self._held -= nbytes

    @property
    def nbytes(self) -> int:
        """Of all groups that may move."""
        return sum(entry[2] for entry in self.made)

    def is_complete(self) -> bool:
        """Whether backward has come to every group."""
        return len(self.needed) == len(self.made) > 0

    def trace(self) -> OffloadTrace:
        """The times in microseconds, without waits; waits for the device."""
        waited = [0.0, *accumulate(self.lanes.elapsed_us(*wait) for wait in self.waits.all)]

        def worked(start: Mark, end: Mark) -> float:
            return self.lanes.elapsed_us(start.clock, end.clock) - (waited[end.waits] - waited[start.waits])

        groups, passed = [], 0.0
        begin = min(self.needed.values(), key=lambda mark: worked(self.started, mark))
        for order, (name, layer, nbytes, copies, made) in enumerate(self.made):
            passed = max(passed, worked(self.started, made))
            needed = max(0.0, worked(begin, self.needed[order]))
            groups.append(OffloadGroup(name, layer, nbytes, passed, needed, max(1, copies)))
        return OffloadTrace(tuple(groups), passed, max(group.backward_us for group in groups),
                            forward_room=self.room.nbytes)
