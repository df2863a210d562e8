"""Which sets of groups are worth a try: those that copies would keep pace with, for many paces.

    pace     0 ........................ all bytes of a forward in its time ....... no limit
    moved    nothing, ever denser sets spread evenly over the forward, ......... everything

For a pace (bytes per us), groups are taken in forward order as long as compute would not wait for their copies: at most
`in_flight` of them unfinished, all finished when the forward ends, and each back before its backward. So the last
groups of a forward, which are needed first, stay where they are (the margin), and the others take turns.

The invariant: sets follow from the trace's bytes and compute times alone, not from the budget or the speed of copies.
So whoever picks the best of them gets no worse by a larger budget or faster copies. Few groups: all subsets.
"""
from collections.abc import Iterator, Sequence
from itertools import product

from packgraph.plan.offload import OffloadTrace
from packgraph.plan.offload_passes import Moves

FEW = 8  # movable groups of which all subsets are tried
SHARES = 48  # paces up to that of all bytes in the time of a forward
FASTER = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # and beyond, for sets that make compute wait
IN_FLIGHT = (1, 2, 4)

Candidate = tuple[Moves, int]  # the moves, and how many copies to the host may be in flight


def candidates(trace: OffloadTrace, movable: Sequence[bool], few: int = FEW) -> list[Candidate]:
    """Sets to choose from, each once, nothing at all first. movable: groups that may move. few: see FEW."""
    if sum(movable) <= few:
        return list(_subsets(movable))
    found: dict[Candidate, None] = {((False,) * len(movable), 0): None}
    for moves in _tails(trace, movable):
        found.update({(moves, in_flight): None for in_flight in (0, *IN_FLIGHT)})
    movable_groups = [index for index, may in enumerate(movable) if may]
    total = sum(trace.groups[index].bytes for index in movable_groups)
    if trace.forward_us > 0 and total > 0:
        shares = [*((step + 1) / SHARES for step in range(SHARES)), *FASTER]
        # Small groups can keep a large one from its turn: once with them, once without.
        for least in (0.0, total / len(movable_groups)):
            large = [index for index in movable_groups if trace.groups[index].bytes >= least]
            line = _Line(trace, large)
            for share, in_flight in product(shares, IN_FLIGHT):
                moves = line.in_step(share * total / trace.forward_us, in_flight)
                found[(moves, in_flight)] = None
                if in_flight == IN_FLIGHT[-1]:
                    # Copies slower than the pace wait less behind one another with more of them in flight.
                    found[(moves, 2 * in_flight)] = None
    return list(found)


def _subsets(movable: Sequence[bool]) -> Iterator[Candidate]:
    """All of them, with every bound that makes a difference."""
    for moves in product(*((False, True) if may else (False,) for may in movable)):
        for in_flight in range(max(sum(moves), 1)):
            yield moves, in_flight


def _tails(trace: OffloadTrace, movable: Sequence[bool]) -> Iterator[Moves]:
    """All but the 0, 1, 2, 4, 8, ... groups that backwards need first."""
    late = [index for index in trace.backward_order if movable[index]]
    kept = 0
    while kept <= len(late):
        stay = set(late[:kept])
        yield tuple(may and index not in stay for index, may in enumerate(movable))
        kept = max(2 * kept, 1)


class _Line:
    """The groups that may move, as plain numbers."""

    def __init__(self, trace: OffloadTrace, groups: Sequence[int]) -> None:
        self.count, self.end_us = len(trace.groups), trace.forward_us
        self.forward = [(index, trace.groups[index].forward_us, trace.groups[index].bytes) for index in groups]
        may = set(groups)
        self.backward = [(index, trace.groups[index].backward_us, trace.groups[index].bytes)
                         for index in trace.backward_order if index in may]
        self.first_us = trace.groups[trace.backward_order[0]].backward_us

    def in_step(self, pace: float, in_flight: int) -> Moves:
        """The groups that are moved at `pace` without waiting, with `in_flight` (1 or more) copies at most."""
        moves, ends, end_us = [False] * self.count, [0.0] * in_flight, self.end_us
        for index, now, nbytes in self.forward:
            if ends[-in_flight] <= now:
                end = max(ends[-1], now) + nbytes / pace
                if end <= end_us:
                    ends.append(end)
                    moves[index] = True
        free_at = self.first_us
        for index, needed, nbytes in self.backward:
            if moves[index]:
                end = free_at + nbytes / pace
                if end > needed:
                    moves[index] = False
                else:
                    free_at = end
        return tuple(moves)
