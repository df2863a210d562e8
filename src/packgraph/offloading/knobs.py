"""Offloading by hand: the classic knobs instead of a budget.

    groups of a forward   0 1 2 3 4 5 6 7 8 9   group 3 is smaller than min_bytes
    margin 2                              x x   needed first by the backward: no time to reload them
    delta, rank 1                       x       later ranks have fewer microbatches in flight
    fraction 0.5                  x x x         of the 6 that are left the last ones stay
    moved                 0 1 2                 half of them, rounded up

After Megatron-Core's fine-grained activation offloading, whose delta keeps the first groups of a
forward; here it keeps those that are needed first, which are the harder ones to reload.
"""

import math
from dataclasses import dataclass

import numpy as np

from packgraph.offloading.plan import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import Moves, Passes, predicted, with_releases

NEAR = 1e-9  # 0.7 of 10 groups are 7, whatever floats say


@dataclass(frozen=True)
class OffloadKnobs:
    """Options that are set by hand. Raises ValueError with all reasons when it makes no sense.

    fraction: of the groups that may move, 0 to 1; those first in the forward move. min_bytes:
    smaller groups stay. margin: so many groups stay that the backward needs first, all parts of
    them; None = the last one of each module. delta_bytes_per_pp_rank: this many bytes more stay on
    each later rank of a pipeline. in_flight: copies to the host at one time.
    """

    fraction: float = 1.0
    min_bytes: int = 2**20
    margin: int | None = None
    delta_bytes_per_pp_rank: int = 0
    in_flight: int = 2

    def __post_init__(self) -> None:
        errors = [
            f"{name} must be at least 0, got {value}"
            for name, value in (
                ("min_bytes", self.min_bytes),
                ("margin", 0 if self.margin is None else self.margin),
                ("delta_bytes_per_pp_rank", self.delta_bytes_per_pp_rank),
                ("in_flight", self.in_flight),
            )
            if value < 0
        ]
        if not 0 <= self.fraction <= 1:
            errors.append(f"fraction must be 0 to 1, got {self.fraction}")
        if errors:
            raise ValueError("offloading by hand: " + "; ".join(errors))


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
