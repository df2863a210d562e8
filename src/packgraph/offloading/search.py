"""Which groups move, for a budget of memory or of time: the best of the candidates
(`offloading/sets.py`).

    bytes: "fit in N GiB"       least waiting  among plans whose peak fits
    time:  "lose at most 1 %"   least peak     among plans that wait no longer

The invariant: a larger budget never makes the result worse, nor do faster copies. Candidates do not
depend on either, each is judged exactly, and what is skipped could not have won. Up to `FEW`
movable groups the result is the best there is. Nothing depends on clocks, so all ranks with the
same trace find the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packgraph.graphs.memory.budget import shown
from packgraph.offloading.passes import BackwardTimes, Moves, Passes
from packgraph.offloading.plan import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.sets import FEW, candidates
from packgraph.offloading.simulate import predicted, with_releases

STEPS = 4096  # of memory between which a budget of time chooses, of the bytes of all groups
DIGITS = 6  # of a microsecond, below which waits are equal


@dataclass(frozen=True)
class _Candidate:
    """One set of groups whose forward is judged. peak, kept: bytes. place: among all candidates."""

    exposed_us: float
    peak: int
    kept: int
    place: int
    moves: Moves
    in_flight: int

    def plan(self, backward: BackwardTimes) -> OffloadPlan:
        return OffloadPlan(self.moves, backward.reload_at, self.in_flight)


class _Judged:
    """All candidates of a trace and what their forwards cost."""

    def __init__(
        self, trace: OffloadTrace, speed: CopySpeed, movable: Sequence[bool] | None, few: int
    ) -> None:
        if movable is not None and len(movable) != len(trace.groups):
            raise ValueError(
                f"the trace has {len(trace.groups)} groups, and {len(movable)} are said to be "
                "movable or "
                "not"
            )
        self.passes = Passes(trace, speed)
        self.all = candidates(
            trace, (True,) * len(trace.groups) if movable is None else tuple(movable), few
        )
        self.forwards = self.passes.forwards(self.all.moves, self.all.in_flight)

    def __getitem__(self, place: int) -> _Candidate:
        forwards = self.forwards
        return _Candidate(
            float(forwards.exposed_us[place]),
            int(forwards.peak_bytes[place]),
            int(forwards.kept_bytes[place]),
            place,
            *self.all[place],
        )

    def least_peak(self) -> int:
        """The lowest peak of any candidate, however long compute waits."""
        least: int | None = None
        for place in np.argsort(self.forwards.peak_bytes, kind="stable").tolist():
            candidate = self[place]
            if least is not None and candidate.peak >= least:
                break
            peak = max(candidate.peak, self.inline_peak(candidate))
            least = peak if least is None else min(least, peak)
        assert least is not None, "to move nothing is always among the candidates"
        return least

    def inline_peak(self, candidate: _Candidate) -> int:
        """The peak of a backward that reloads every group only when it is needed; none has a lower
        one."""
        backward = self.passes.backward(candidate.moves, candidate.kept, 0)
        assert backward is not None, "no limit on waiting was given"
        return backward.peak_bytes


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
    judged = _Judged(trace, speed, movable, few)
    waits = np.round(judged.forwards.exposed_us, DIGITS)
    best: tuple[float, int, int, int] | None = None
    found: OffloadPlan | None = None
    # Those that wait least and move least come first: once the best beats what a forward alone
    # costs, all is said.
    for place in np.lexsort((-judged.forwards.kept_bytes, waits)).tolist():
        one, wait = judged[place], float(waits[place])
        moved = trace.bytes - one.kept
        if best is not None and (wait, moved) > best[:2]:
            break
        if one.peak > budget:
            continue
        most = best[0] if best is not None else float("inf")
        backward = judged.passes.backward(one.moves, one.kept, budget, most + 1 - one.exposed_us)
        if backward is None or backward.peak_bytes > budget:
            continue
        key = (
            round(one.exposed_us + backward.exposed_us, DIGITS),
            moved,
            max(one.peak, backward.peak_bytes),
            place,
        )
        if best is None or key < best:
            best, found = key, one.plan(backward)
    if found is None:
        raise ValueError(
            f"no plan of offloading fits in {shown(budget)}: the least that is possible is "
            f"{shown(judged.least_peak())} (without offloading {shown(trace.kept_peak_bytes)}, of "
            "which "
            f"{shown(trace.other_bytes)} are not activations that may move); raise the budget, let "
            "more "
            "modules move, or make microbatches smaller"
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
    microbatch; 0.01 is 1 %.

    The rest as in `plan_for_bytes`; peaks are as low as they can be for a set up to 1 / `STEPS` of
    all groups' bytes. Raises ValueError for a negative `lost`. (To move nothing loses nothing, so
    there always is a plan.)
    """
    if not lost >= 0:
        raise ValueError(f"a share of time to lose must be at least 0, got {lost}")
    judged = _Judged(trace, speed, movable, few)
    budget_us = lost * trace.compute_us + 10.0**-DIGITS
    best: int | None = None
    found: OffloadPlan | None = None
    for place in np.argsort(judged.forwards.peak_bytes, kind="stable").tolist():
        one = judged[place]
        if best is not None and one.peak >= best:
            break
        if one.exposed_us > budget_us:
            continue
        backward = _lowest(judged, one, budget_us - one.exposed_us, best)
        if backward is not None and (best is None or max(one.peak, backward.peak_bytes) < best):
            best, found = max(one.peak, backward.peak_bytes), one.plan(backward)
    assert found is not None, "to move nothing is always among the candidates, and loses no time"
    return predicted(trace, speed, with_releases(trace, speed, found))


def least_peak_bytes(
    trace: OffloadTrace, speed: CopySpeed, movable: Sequence[bool] | None = None, few: int = FEW
) -> int:
    """The lowest peak of any candidate, however long compute waits."""
    return _Judged(trace, speed, movable, few).least_peak()


def _lowest(
    judged: _Judged, one: _Candidate, most_us: float, best: int | None
) -> BackwardTimes | None:
    """The backward with the lowest limit on memory, in steps up to `best`, that waits for at most
    `most_us`; None when there is none."""
    floor = max(one.peak, judged.inline_peak(one))
    if best is not None and floor >= best:
        return None
    total = judged.passes.trace.bytes
    step = max(total // STEPS, 1)

    def at(steps: int) -> BackwardTimes | None:
        return judged.passes.backward(one.moves, one.kept, floor + steps * step, most_us)

    # Beyond the step that reaches `best` every peak that is new is at least `best`.
    low, high = 0, (best - 1 - floor if best is not None else total) // step + 1
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
