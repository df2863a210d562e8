"""What a pass was seen to do, for plans: bytes of its groups, and when main came to their forwards and backwards.

Plans are to know about compute alone. Where groups moved meanwhile main has waited for copies, so its waits are timed,
too, and taken out:

    main   | F0 | F1 |wait| F2 |        a clock at every bar
                                        F2 is made after F0 + F1 + F2
"""
from itertools import accumulate
from typing import Any, NamedTuple

from packgraph.graphs.lanes import Copy, Lanes
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

    def committed(self, name: str, layer: int, nbytes: int, copies: int) -> None:
        """The next group is made."""
        self.made.append((name, layer, nbytes, copies, self.waits.mark()))

    def reached(self, order: int) -> None:
        """Backward has come to group `order`."""
        self.needed.setdefault(order, self.waits.mark())

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
        return OffloadTrace(tuple(groups), passed, max(group.backward_us for group in groups))
