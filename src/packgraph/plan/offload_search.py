"""Which groups move, for a budget of memory or of time: the best of the candidates (`plan/offload_sets.py`).

    bytes: "fit in N GiB"       least waiting  among plans whose peak fits
    time:  "lose at most 1 %"   least peak     among plans that wait no longer

The invariant: a larger budget never makes the result worse, nor do faster copies. Candidates do not depend on either,
each is judged exactly, and what is skipped could not have won. Up to `FEW` movable groups the result is the best there
is. Nothing depends on clocks, so all ranks with the same trace find the same plan.
"""
from collections.abc import Sequence

from packgraph.plan.memory_budget import shown
from packgraph.plan.offload import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.plan.offload_passes import Backward, Forward, Moves, Passes
from packgraph.plan.offload_sets import FEW, candidates
from packgraph.plan.offload_simulate import predicted

STEPS = 4096  # of memory between which a budget of time chooses, of the bytes of all groups
DIGITS = 6  # of a microsecond, below which waits are equal


def plan_for_bytes(trace: OffloadTrace, speed: CopySpeed, budget: int, movable: Sequence[bool] | None = None,
                   few: int = FEW) -> OffloadPlan:
    """The plan with the least waiting whose peak is at most `budget` bytes (`other_bytes` counts); among equals the one
    that moves least.

    movable: groups that may move, default all. few: as in `candidates`. Raises ValueError when no plan fits.
    """
    passes = Passes(trace, speed)
    best: tuple[float, int, int, int] | None = None
    found: OffloadPlan | None = None
    for moves, in_flight in candidates(trace, _movable(trace, movable), few):
        kept = passes.kept(moves)
        # Between forward and backward all microbatches in flight hold what they keep.
        if passes.base(kept) + kept > budget or (best and best[0] == 0 and best[1] < trace.bytes - kept):
            continue
        forward = passes.forward(moves, in_flight)
        most = best[0] if best else float("inf")
        if forward.peak_bytes > budget or round(forward.exposed_us, DIGITS) > most:
            continue
        backward = passes.backward(moves, kept, budget, most + 1 - forward.exposed_us)
        if backward is None or backward.peak_bytes > budget:
            continue
        exposed = round(forward.exposed_us + backward.exposed_us, DIGITS)
        key = (exposed, trace.bytes - kept, max(forward.peak_bytes, backward.peak_bytes), in_flight)
        if best is None or key < best:
            best, found = key, OffloadPlan(moves, backward.reload_at, in_flight)
    if found is None:
        least = least_peak_bytes(trace, speed, movable, few)
        raise ValueError(f"no plan of offloading fits in {shown(budget)}: the least that is possible is {shown(least)} "
                         f"(without offloading {shown(trace.kept_peak_bytes)}, of which {shown(trace.other_bytes)} are "
                         "not activations that may move); raise the budget, let more modules move, or make "
                         "microbatches smaller")
    return predicted(trace, speed, found)


def plan_for_time(trace: OffloadTrace, speed: CopySpeed, lost: float, movable: Sequence[bool] | None = None,
                  few: int = FEW) -> OffloadPlan:
    """The plan with the lowest peak that waits for at most `lost` times the compute of a microbatch; 0.01 is 1 %.

    The rest as in `plan_for_bytes`; peaks are as low as they can be for a set up to 1 / `STEPS` of all groups' bytes.
    Raises ValueError for a negative `lost`. (To move nothing loses nothing, so there always is a plan.)
    """
    if not lost >= 0:
        raise ValueError(f"a share of time to lose must be at least 0, got {lost}")
    passes = Passes(trace, speed)
    budget_us = lost * trace.compute_us + 10.0**-DIGITS
    judged = []
    for place, (moves, in_flight) in enumerate(candidates(trace, _movable(trace, movable), few)):
        forward = passes.forward(moves, in_flight)
        if forward.exposed_us <= budget_us:
            judged.append((forward.peak_bytes, place, moves, in_flight, forward))
    judged.sort(key=lambda entry: entry[:2])
    best, found = None, None
    for peak, _, moves, in_flight, forward in judged:
        if best is not None and peak >= best:
            break
        floor = max(peak, _inline_peak(passes, moves, forward.kept_bytes))
        backward = _lowest(passes, moves, forward, floor, budget_us, best)
        if backward is not None and (best is None or max(peak, backward.peak_bytes) < best):
            best, found = max(peak, backward.peak_bytes), OffloadPlan(moves, backward.reload_at, in_flight)
    if found is None:
        raise AssertionError("to move nothing must be among the candidates and loses no time")
    return predicted(trace, speed, found)


def least_peak_bytes(trace: OffloadTrace, speed: CopySpeed, movable: Sequence[bool] | None = None,
                     few: int = FEW) -> int:
    """The lowest peak of any candidate, however long compute waits."""
    passes = Passes(trace, speed)
    return min(max(passes.forward(moves, in_flight).peak_bytes, _inline_peak(passes, moves, passes.kept(moves)))
               for moves, in_flight in candidates(trace, _movable(trace, movable), few))


def _movable(trace: OffloadTrace, movable: Sequence[bool] | None) -> Moves:
    if movable is not None and len(movable) != len(trace.groups):
        raise ValueError(f"the trace has {len(trace.groups)} groups, and {len(movable)} are said to be movable or not")
    return (True,) * len(trace.groups) if movable is None else tuple(movable)


def _inline_peak(passes: Passes, moves: Moves, kept: int) -> int:
    """The peak of a backward that reloads every group only when it is needed; none has a lower one."""
    backward = passes.backward(moves, kept, 0)
    assert backward is not None, "no limit on waiting was given"
    return backward.peak_bytes


def _lowest(passes: Passes, moves: Moves, forward: Forward, floor: int, budget_us: float, best: int | None
            ) -> Backward | None:
    """The backward with the lowest limit on memory, from `floor` in steps up to `best`, with which the waiting stays
    within `budget_us`; None when there is none."""
    step = max(passes.trace.bytes // STEPS, 1)

    def at(steps: int) -> Backward | None:
        return passes.backward(moves, forward.kept_bytes, floor + steps * step, budget_us - forward.exposed_us)

    if best is not None and floor >= best:
        return None
    # Beyond the step that reaches `best` every peak that is new is at least `best`.
    low, high = 0, (best - 1 - floor if best is not None else passes.trace.bytes) // step + 1
    found = at(low)
    if found is not None:
        return found
    found = at(high)
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        if tried is None:
            low = middle
        else:
            high, found = middle, tried
    return found
