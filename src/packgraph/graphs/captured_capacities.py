"""Declared capacities of which some are left out: their microbatches run eagerly, and the count
says why."""

from collections.abc import Iterable, Mapping

from packgraph.graphs.fallback import OVER_BUDGET as OVER_BUDGET
from packgraph.packing.capacity import Capacity


class CapturedCapacities(tuple[Capacity, ...]):
    """The capacities that graphs are captured for. dropped: those that were declared as well, with
    the reason.

    True even when none is kept: an empty tuple of capacities would mean that every shape may be
    captured.
    """

    dropped: dict[Capacity, str]

    def __new__(
        cls, kept: Iterable[Capacity], dropped: Mapping[Capacity, str]
    ) -> "CapturedCapacities":
        made = super().__new__(cls, sorted(kept))
        made.dropped = dict(dropped)
        return made

    def __bool__(self) -> bool:
        return bool(len(self) or self.dropped)
