"""What a pass was seen to do, for plans: bytes of its groups, and when main came to their forwards and backwards.

Times are those of the program as it ran. Where groups moved meanwhile, they hold waits for copies, too; what a plan is
to know about compute alone is measured with `Offload.measures`, which moves nothing.
"""
from typing import Any

from packgraph.graphs.lanes import Lanes
from packgraph.plan.offload.plan import OffloadGroup, OffloadTrace


class PassTimes:
    """The times of one eager pass, by order of its groups."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.started = lanes, lanes.clock()
        self.made: list[tuple[str, int, int, int, Any]] = []  # name, layer, bytes, copies, time
        self.needed: dict[int, Any] = {}

    def committed(self, name: str, layer: int, nbytes: int, copies: int) -> None:
        """The next group is made."""
        self.made.append((name, layer, nbytes, copies, self.lanes.clock()))

    def reached(self, order: int) -> None:
        """Backward has come to group `order`."""
        self.needed.setdefault(order, self.lanes.clock())

    @property
    def nbytes(self) -> int:
        """Of all groups that may move."""
        return sum(entry[2] for entry in self.made)

    def is_complete(self) -> bool:
        """Whether backward has come to every group."""
        return len(self.needed) == len(self.made) > 0

    def trace(self) -> OffloadTrace:
        """The times in microseconds; waits for the device."""
        groups, passed = [], 0.0
        begin = self.needed[min(self.needed, key=self._since_start)]
        for order, (name, layer, nbytes, copies, made) in enumerate(self.made):
            passed = max(passed, self.lanes.elapsed_us(self.started, made))
            needed = max(0.0, self.lanes.elapsed_us(begin, self.needed[order]))
            groups.append(OffloadGroup(name, layer, nbytes, passed, needed, max(1, copies)))
        return OffloadTrace(tuple(groups), passed, max(group.backward_us for group in groups))

    def _since_start(self, order: int) -> float:
        return self.lanes.elapsed_us(self.started, self.needed[order])


