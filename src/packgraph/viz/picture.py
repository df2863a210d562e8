"""What a drawing of a schedule shows, before it is text or SVG: who runs what when, in which slot
and bucket.

Chunks are named by letters and slots by their chunk's letter and a number: b0 is slot 0 of chunk b.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from packgraph.parallel.pipeline.schedule import Action, Schedule, Timeline, assign_slots, simulate


@dataclass(frozen=True)
class DrawnAction:
    """One action in a drawing. `bucket` is an index of the picture's capacities, None when there
    are none."""

    action: Action
    chunk: int
    slot: int
    bucket: int | None
    start: float
    end: float

    @property
    def label(self) -> str:
        """F3: the forward of microbatch 3."""
        return f"{self.action.kind}{self.action.microbatch}"

    @property
    def slot_name(self) -> str:
        """b0: slot 0 of chunk b."""
        return f"{chunk_name(self.chunk)}{self.slot}"


@dataclass(frozen=True)
class Picture:
    """Blocks per rank in order of time. capacities: tokens per bucket. Times are in forwards of the
    smallest bucket."""

    schedule: Schedule
    timeline: Timeline
    rows: tuple[tuple[DrawnAction, ...], ...]
    capacities: tuple[int, ...]
    buckets: tuple[int, ...]


def chunk_name(chunk: int) -> str:
    """a, b, c, ...; numbers in dots beyond the alphabet."""
    return string.ascii_lowercase[chunk] if chunk < len(string.ascii_lowercase) else f".{chunk}."


def picture_errors(
    microbatches: int, capacities: Sequence[int], buckets: Sequence[int]
) -> list[str]:
    """Every reason why these buckets do not fit the schedule; empty when they do."""
    errors = [
        f"a capacity must have at least 1 token, got {tokens}"
        for tokens in capacities
        if tokens < 1
    ]
    if buckets and not capacities:
        errors.append("buckets are indices of capacities: say which capacities there are")
    if buckets and len(buckets) != microbatches:
        errors.append(
            f"there must be one bucket per microbatch: {microbatches} microbatches, "
            f"{len(buckets)} buckets"
        )
    if capacities:
        errors += [
            f"microbatch {microbatch}: there is no bucket {bucket}, only 0 to {len(capacities) - 1}"
            for microbatch, bucket in enumerate(buckets)
            if not 0 <= bucket < len(capacities)
        ]
    return errors


def make_picture(
    schedule: Schedule, capacities: Sequence[int] = (), buckets: Sequence[int] = ()
) -> Picture:
    """Simulate `schedule` and name the slots. A backward is drawn twice as long as its forward,
    either in proportion to the tokens of the bucket.

    capacities: tokens per bucket. buckets: one index of them per microbatch, default the largest
    for all. Raises ValueError with all reasons when the buckets do not fit, or when the schedule
    cannot run.
    """
    errors = picture_errors(schedule.microbatches, capacities, buckets)
    if errors:
        raise ValueError("these buckets do not fit the schedule:\n  - " + "\n  - ".join(errors))
    if capacities and not buckets:
        buckets = [list(capacities).index(max(capacities))] * schedule.microbatches
    smallest = min((capacities[bucket] for bucket in buckets), default=1)
    timeline = simulate(
        schedule, microbatch_costs=[capacities[bucket] / smallest for bucket in buckets] or None
    )
    slots = assign_slots(schedule)
    rows = tuple(
        tuple(
            DrawnAction(
                action,
                schedule.chunk_of(action.stage),
                slots[(rank, action.stage, action.microbatch)],
                buckets[action.microbatch] if buckets else None,
                start,
                end,
            )
            for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank])
        )
        for rank, row in enumerate(schedule.rows)
    )
    return Picture(schedule, timeline, rows, tuple(capacities), tuple(buckets))
