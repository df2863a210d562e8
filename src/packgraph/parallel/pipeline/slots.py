"""Slots: how many microbatches of a chunk are in flight at most, and which of them owns which slot.

A microbatch owns a slot of a chunk from its forward to its backward there. Graphs are captured per
slot, so the number of slots is fixed before the microbatch counts of later steps are known: it must
suffice for every legal count, and one too many is memory wasted.

    rank 0 of 2, 1F1B     F0    F1    B0    F2    B1    F3    B2    B3
    slot                  0     1     0     0     1     1     0     1
"""

import heapq

from packgraph.parallel.pipeline.schedule import Schedule, make_schedule

Owner = tuple[int, int, int]


def peak_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """[rank][chunk] -> the largest number of microbatches between their forward and backward at one
    time."""
    peaks = []
    for row in schedule.rows:
        alive, most = [0] * schedule.chunks, [0] * schedule.chunks
        for action in row:
            chunk = schedule.chunk_of(action.stage)
            alive[chunk] += 1 if action.kind == "F" else -1
            most[chunk] = max(most[chunk], alive[chunk])
        peaks.append(tuple(most))
    return tuple(peaks)


def slot_counts(ranks: int, chunks: int, group: int | None = None) -> tuple[tuple[int, ...], ...]:
    """[rank][chunk] -> slots that suffice for every number of microbatches, and all of which some
    number needs.

    Two full groups reach every peak: in the second one the backwards of the first have set in, and
    from then on each forward is followed by a backward. Any other number of microbatches is a
    longer run of the same, a part of it or one smaller group. Proven by enumeration up to 8 ranks
    and 4 chunks in the tests. Raises ValueError like `make_schedule`.
    """
    return peak_in_flight(make_schedule(ranks, chunks, 2 * max(ranks, group or 1), group))


def assign_slots(schedule: Schedule) -> dict[Owner, int]:
    """(rank, stage, microbatch) -> its slot of that chunk: the lowest one free when its forward
    runs.

    The same on every rank that computes it, and never more slots than `peak_in_flight`. Raises
    ValueError when a backward comes without its forward, or a forward twice before its backward.
    """
    owned: dict[Owner, int] = {}
    for rank, row in enumerate(schedule.rows):
        free: dict[int, list[int]] = {}
        made: dict[int, int] = {}
        alive: set[tuple[int, int]] = set()
        for action in row:
            stage, key = action.stage, (action.stage, action.microbatch)
            if (action.kind == "F") == (key in alive):
                fault = (
                    "runs while its microbatch is in flight"
                    if key in alive
                    else "has no forward before it"
                )
                raise ValueError(f"no slots for this schedule: {action} on rank {rank} {fault}")
            if action.kind == "B":
                alive.remove(key)
                heapq.heappush(free[stage], owned[(rank, *key)])
                continue
            alive.add(key)
            if not free.setdefault(stage, []):
                heapq.heappush(free[stage], made.get(stage, 0))
                made[stage] = made.get(stage, 0) + 1
            owned[(rank, *key)] = heapq.heappop(free[stage])
    return owned
