"""Plans of offloading: for a budget of memory or of time the best of many candidates, or by hand.

    bytes: "fit in N GiB"       least waiting  among plans whose peak fits
    time:  "lose at most 1 %"   least peak     among plans that wait no longer

The invariant: a larger budget never makes the result worse, nor do faster copies. Candidates do not
depend on either, each is judged exactly, and what is skipped could not have won. Up to `FEW`
movable groups the result is the best there is. Nothing depends on clocks, so all ranks with the
same trace find the same plan.

Candidates are the sets of groups that copies would keep pace with, for many paces:

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

By hand (`OffloadKnobs`), the classic knobs say what moves:

    groups of a forward   0 1 2 3 4 5 6 7 8 9   group 3 is smaller than min_bytes
    margin 2                              x x   needed first by the backward: no time to reload them
    delta, rank 1                       x       later ranks have fewer microbatches in flight
    fraction 0.5                  x x x         of the 6 that are left the last ones stay
    moved                 0 1 2                 half of them, rounded up

After Megatron-Core's fine-grained activation offloading, whose delta keeps the first groups of a
forward; here it keeps those that are needed first, which are the harder ones to reload.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from packgraph.graphs.memory.budget import shown
from packgraph.offloading.plan import CopySpeed, OffloadKnobs, OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import BackwardTimes, Moves, Passes, predicted, with_releases

FEW = 8  # movable groups of which all subsets are tried
SHARES = 80  # paces up to that of all bytes in the time of a forward
FASTER = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)  # and beyond, for sets that make compute wait
IN_FLIGHT = (1, 2, 4)
FINE = tuple(
    0.02 * 1.03**step for step in range(132)
)  # shares like those, up to 1, for sets that fill what is left
LARGE = (0, 1, 2, 4, None)  # groups above the average that these may have, None = all
MANY = 64  # copies in flight, for them
STEPS = 4096  # of memory between which a budget of time chooses, of the bytes of all groups
NEAR = 1e-9  # 0.7 of 10 groups are 7, whatever floats say
DIGITS = 6  # of a microsecond, below which waits are equal


def candidates(
    trace: OffloadTrace, movable: Sequence[bool], few: int = FEW
) -> tuple[np.ndarray, np.ndarray]:
    """Sets to choose from, bool [C, groups], and for each a bound of copies in flight, int64 [C]:
    every pair once, nothing at all first. movable: groups that may move. few: see FEW."""
    # Nothing is gained by moving nothing.
    movable = [may and group.bytes > 0 for group, may in zip(trace.groups, movable)]
    if sum(movable) <= few:
        found = list(_subsets(movable))
        sets = np.array([moves for moves, _ in found], dtype=bool)
        return sets.reshape(len(found), len(movable)), np.array([bound for _, bound in found])
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
    every, bound = np.concatenate(moves), np.concatenate(in_flight)
    keys = np.concatenate([np.packbits(every, axis=1), bound[:, None].astype(np.uint8)], axis=1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return every[first], bound[first]


def _few_large(sizes: np.ndarray) -> np.ndarray:
    """Groups that may move, for each number of LARGE: bool [len(LARGE), groups]. sizes: 0 of those
    that may not."""
    large = sizes > sizes.sum() / (sizes > 0).sum()
    number = np.cumsum(large)  # of a large group, from 1
    return np.array(
        [
            (sizes > 0) & (~large | (number <= (len(sizes) if most is None else most)))
            for most in LARGE
        ]
    )


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


class _Candidate(NamedTuple):
    """One set of groups, and what its forward costs. peak, kept: bytes."""

    exposed_us: float
    peak: int
    kept: int
    in_flight: int
    moves: Moves


def _judged(passes: Passes, movable: Sequence[bool] | None, few: int) -> list[_Candidate]:
    """All candidates of a trace; arguments are those of `plan_for_bytes`."""
    groups = passes.trace.groups
    may = (True,) * len(groups) if movable is None else tuple(movable)
    if len(may) != len(groups):
        raise ValueError(
            f"the trace has {len(groups)} groups, and {len(may)} are said to be movable or not"
        )
    moves, in_flight = candidates(passes.trace, may, few)
    costs = passes.forwards(moves, in_flight)
    columns = (costs.exposed_us, costs.peak_bytes, costs.kept_bytes, in_flight)
    rows = zip(*(column.tolist() for column in columns), map(tuple, moves.tolist()), strict=True)
    return [_Candidate(*row) for row in rows]


def plan_for_bytes(
    trace: OffloadTrace,
    speed: CopySpeed,
    budget: int,
    movable: Sequence[bool] | None = None,
    few: int = FEW,
) -> OffloadPlan:
    """The plan with the least waiting whose peak is at most `budget` bytes (`other_bytes` counts);
    among equals the one that moves least.

    movable: groups that may move, default all. few: as in `candidates`. Raises ValueError when no
    plan fits.
    """
    passes = Passes(trace, speed)
    judged = _judged(passes, movable, few)
    waits = np.round([one.exposed_us for one in judged], DIGITS)
    best: tuple[float, int, int, int] | None = None
    found: OffloadPlan | None = None
    # Those that wait least and move least come first: once the best beats what a forward alone
    # costs, all is said.
    for place in np.lexsort((np.array([-one.kept for one in judged]), waits)).tolist():
        one, wait = judged[place], float(waits[place])
        moved = trace.bytes - one.kept
        if best is not None and (wait, moved) > best[:2]:
            break
        if one.peak > budget:
            continue
        most = best[0] if best is not None else float("inf")
        backward = passes.backward(one.moves, one.kept, budget, most + 1 - one.exposed_us)
        if backward is None or backward.peak_bytes > budget:
            continue
        waited = round(one.exposed_us + backward.exposed_us, DIGITS)
        key = (waited, moved, max(one.peak, backward.peak_bytes), place)
        if best is None or key < best:
            best, found = key, OffloadPlan(one.moves, backward.reload_at, one.in_flight)
    if found is None:
        least = plan_for_time(trace, speed, float("inf"), movable, few).peak_bytes
        raise ValueError(
            f"no plan of offloading fits in {shown(budget)}: the least that is possible is "
            f"{shown(least)} (without offloading {shown(trace.kept_peak_bytes)}, of which "
            f"{shown(trace.other_bytes)} are not activations that may move); raise the budget, let "
            "more modules move, or make microbatches smaller"
        )
    return predicted(trace, speed, with_releases(trace, speed, found))


def plan_for_time(
    trace: OffloadTrace,
    speed: CopySpeed,
    lost: float,
    movable: Sequence[bool] | None = None,
    few: int = FEW,
) -> OffloadPlan:
    """The plan with the lowest peak that waits for at most `lost` times the compute of a
    microbatch; 0.01 is 1 %, infinity sets no limit.

    The rest as in `plan_for_bytes`; peaks are as low as they can be for a set up to 1 / `STEPS` of
    all groups' bytes. Raises ValueError for a negative `lost`. (To move nothing loses nothing, so
    there always is a plan.)
    """
    if not lost >= 0:
        raise ValueError(f"a share of time to lose must be at least 0, got {lost}")
    passes = Passes(trace, speed)
    budget_us = lost if math.isinf(lost) else lost * trace.compute_us + 10.0**-DIGITS
    best: int | None = None
    found: OffloadPlan | None = None
    for one in sorted(_judged(passes, movable, few), key=lambda one: one.peak):
        if best is not None and one.peak >= best:
            break
        if one.exposed_us > budget_us:
            continue
        backward = _lowest(passes, one, budget_us - one.exposed_us, best)
        if backward is not None and (best is None or max(one.peak, backward.peak_bytes) < best):
            best = max(one.peak, backward.peak_bytes)
            found = OffloadPlan(one.moves, backward.reload_at, one.in_flight)
    assert found is not None, "to move nothing is always among the candidates, and loses no time"
    return predicted(trace, speed, with_releases(trace, speed, found))


def _lowest(
    passes: Passes, one: _Candidate, most_us: float, best: int | None
) -> BackwardTimes | None:
    """The backward with the lowest limit on memory, in steps up to `best`, that waits for at most
    `most_us`; None when there is none."""
    # No backward has a lower peak than the one that reloads every group only when it is needed.
    inline = passes.backward(one.moves, one.kept, 0)
    assert inline is not None, "no limit on waiting was given"
    floor = max(one.peak, inline.peak_bytes)
    if best is not None and floor >= best:
        return None
    total = passes.trace.bytes
    step = max(total // STEPS, 1)

    def at(steps: int) -> BackwardTimes | None:
        return passes.backward(one.moves, one.kept, floor + steps * step, most_us)

    # Beyond the step that reaches `best` every peak that is new is at least `best`.
    low, high = 0, (best - 1 - floor if best is not None else total) // step + 1
    if (found := at(low)) is not None:
        return found
    found = at(high)
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        if (tried := at(middle)) is None:
            low = middle
        else:
            high, found = middle, tried
    return found


def knob_moves(trace: OffloadTrace, knobs: OffloadKnobs, pp_rank: int = 0) -> Moves:
    """The groups that move. For a search within them (`movable` of `plan_for_bytes`), too."""
    left = [
        index
        for index in trace.backward_order
        if trace.groups[index].bytes >= max(knobs.min_bytes, 1)
    ]  # needed first at first
    stay: set[int] = set()
    if knobs.margin is None:
        last: dict[str, int] = {}
        for index in sorted(left, reverse=True):
            if (
                last.setdefault(trace.groups[index].name, trace.blocks[index])
                == trace.blocks[index]
            ):
                stay.add(index)
    else:
        first = list(dict.fromkeys(trace.blocks[index] for index in left))[: knobs.margin]
        stay.update(index for index in left if trace.blocks[index] in first)
    kept = pp_rank * knobs.delta_bytes_per_pp_rank
    for index in left:
        if kept > 0 and index not in stay:
            stay.add(index)
            kept -= trace.groups[index].bytes
    left = sorted(set(left) - stay)
    moved = set(left[: math.ceil(len(left) * knobs.fraction - NEAR)])
    return tuple(index in moved for index in range(len(trace.groups)))


def plan_by_knobs(
    trace: OffloadTrace, speed: CopySpeed, knobs: OffloadKnobs, pp_rank: int = 0
) -> OffloadPlan:
    """The plan that the knobs mean. Reloads start as early as they can without a higher peak than
    the forward has."""
    moves, passes = knob_moves(trace, knobs, pp_rank), Passes(trace, speed)
    forward = passes.forwards(np.array([moves], dtype=bool), np.array([knobs.in_flight]))
    backward = passes.backward(moves, int(forward.kept_bytes[0]), int(forward.peak_bytes[0]))
    assert backward is not None, "no limit on waiting was given"
    plan = OffloadPlan(moves, backward.reload_at, knobs.in_flight)
    return predicted(trace, speed, with_releases(trace, speed, plan))
