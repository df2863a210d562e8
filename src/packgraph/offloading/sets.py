"""Which sets of groups are worth a try: those that copies would keep pace with, for many paces.

    pace     0 ........................ all bytes of a forward in its time ....... no limit
    moved    nothing, ever denser sets spread evenly over the forward, ......... everything

For a pace (bytes per us), groups are taken in forward order as long as compute would not wait for
their copies: at most `in_flight` of them unfinished, all finished when the forward ends, and each
back before its backward. So the last groups of a forward, which are needed first, stay where they
are (the margin), and the others take turns.

Large groups do not add up to what copies can take until the forward ends; small ones do. So there
are sets, too, of the first 0, 1, 2, ... groups larger than the average and as many small ones as
fit, with hardly a bound in flight: memory is given back when copies have ended anyway
(`with_releases`).

The invariant: sets follow from the trace's bytes and compute times alone, not from the budget or
the speed of copies. So whoever picks the best of them gets no worse by a larger budget or faster
copies. Few groups: all subsets.

All paces are walked through at once, one step per group for arrays of numbers per candidate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from packgraph.offloading.plan import OffloadTrace

FEW = 8  # movable groups of which all subsets are tried
SHARES = 80  # paces up to that of all bytes in the time of a forward
FASTER = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # and beyond, for sets that make compute wait
IN_FLIGHT = (1, 2, 4)
FINE = tuple(
    0.02 * 1.03**step for step in range(132)
)  # shares like those, up to 1, for sets that fill what is left
LARGE = (0, 1, 2, 4, None)  # groups above the average that these may have, None = all
MANY = 64  # copies in flight, for them


@dataclass(frozen=True)
class Candidates:
    """Sets of groups, each with a bound. moves: bool [C, groups]. in_flight: int64 [C]."""

    moves: np.ndarray
    in_flight: np.ndarray

    def __len__(self) -> int:
        return len(self.in_flight)

    def __getitem__(self, place: int) -> tuple[tuple[bool, ...], int]:
        return tuple(self.moves[place].tolist()), int(self.in_flight[place])


def candidates(trace: OffloadTrace, movable: Sequence[bool], few: int = FEW) -> Candidates:
    """Sets to choose from, each once, nothing at all first. movable: groups that may move. few: see
    FEW."""
    # Nothing is gained by moving nothing.
    movable = [may and group.bytes > 0 for group, may in zip(trace.groups, movable)]
    if sum(movable) <= few:
        found = list(_subsets(movable))
        return Candidates(
            np.array([moves for moves, _ in found], dtype=bool).reshape(len(found), len(movable)),
            np.array([in_flight for _, in_flight in found]),
        )
    tails = list(_tails(trace, movable))
    bounds = (0, *IN_FLIGHT)
    moves = [np.repeat(np.array([[False] * len(movable), *tails]), len(bounds), axis=0)]
    in_flight = [np.tile(bounds, len(tails) + 1)]
    sizes = np.array(
        [group.bytes if may else 0 for group, may in zip(trace.groups, movable)], dtype=float
    )
    if trace.forward_us > 0 and sizes.sum() > 0:
        shares = [*((step + 1) / SHARES for step in range(SHARES)), *FASTER]
        # Small groups can keep a large one from its turn: once with them, once without.
        asked = list(product((0.0, sizes.sum() / sum(movable)), shares, IN_FLIGHT))
        least, share, bound = (np.array(column) for column in zip(*asked))
        allowed = np.array(movable) & (sizes >= least[:, None])
        in_step = _in_step(trace, allowed, share * sizes.sum() / trace.forward_us, bound)
        # Copies slower than the pace wait less behind one another with more of them in flight.
        moves += [in_step, in_step[bound == IN_FLIGHT[-1]]]
        in_flight += [bound, 2 * bound[bound == IN_FLIGHT[-1]]]
        share, bound = np.tile(FINE, len(LARGE)), np.full(len(FINE) * len(LARGE), MANY)
        allowed = np.repeat(_few_large(sizes), len(FINE), axis=0)
        moves.append(_in_step(trace, allowed, share * sizes.sum() / trace.forward_us, bound))
        in_flight.append(bound)
    return _each_once(np.concatenate(moves), np.concatenate(in_flight))


def _few_large(sizes: np.ndarray) -> np.ndarray:
    """For each number of LARGE the groups that may move: bool [len(LARGE), groups]. sizes: 0 of
    those that may not."""
    large = sizes > sizes.sum() / (sizes > 0).sum()
    number = np.cumsum(large)  # of a large group, from 1
    return np.array(
        [
            (sizes > 0) & (~large | (number <= (len(sizes) if most is None else most)))
            for most in LARGE
        ]
    )


def _each_once(moves: np.ndarray, in_flight: np.ndarray) -> Candidates:
    """In the order given."""
    keys = np.concatenate([np.packbits(moves, axis=1), in_flight[:, None].astype(np.uint8)], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    first.sort()
    return Candidates(moves[first], in_flight[first])


def _subsets(movable: Sequence[bool]) -> Iterator[tuple[tuple[bool, ...], int]]:
    """All of them, with every bound that makes a difference."""
    for moves in product(*((False, True) if may else (False,) for may in movable)):
        for in_flight in range(sum(moves) + 1):
            yield moves, in_flight


def _tails(trace: OffloadTrace, movable: Sequence[bool]) -> Iterator[list[bool]]:
    """All but the 0, 1, 2, 4, 8, ... groups that backwards need first."""
    late = [index for index in trace.backward_order if movable[index]]
    kept = 0
    while kept <= len(late):
        stay = set(late[:kept])
        yield [may and index not in stay for index, may in enumerate(movable)]
        kept = max(2 * kept, 1)


def _in_step(
    trace: OffloadTrace, allowed: np.ndarray, pace: np.ndarray, in_flight: np.ndarray
) -> np.ndarray:
    """The groups that are moved without waiting: bool [C, groups].

    allowed: bool [C, groups]. pace: of copies, float [C]. in_flight: copies at one time, 1 or more,
    int [C].
    """
    count, most = len(pace), int(in_flight.max())
    moves, rows = np.zeros(allowed.shape, dtype=bool), np.arange(count)
    # Ends of copies, oldest first, behind `most` that ended at 0; `following` is the place of the
    # next one.
    ends, following = np.zeros((count, allowed.shape[1] + most)), np.full(count, most)
    for index, group in enumerate(trace.groups):
        end = np.maximum(ends[rows, following - 1], group.forward_us) + group.bytes / pace
        taken = (
            allowed[:, index]
            & (ends[rows, following - in_flight] <= group.forward_us)
            & (end <= trace.forward_us)
        )
        ends[rows, following] = end
        following += taken
        moves[:, index] = taken
    free_at = np.full(count, trace.groups[trace.backward_order[0]].backward_us)
    for index in trace.backward_order:
        end = free_at + trace.groups[index].bytes / pace
        moves[:, index] &= end <= trace.groups[index].backward_us
        free_at = np.where(moves[:, index], end, free_at)
    return moves
