"""The figures of many plans of one trace, fast: twins of `offloading/simulate.py` that keep no
record of events.

Forwards are walked through all at once, in arrays of one number per plan; of backwards few are
asked for.

Forward and backward are judged apart, since all copies to the host end with the forward. Where
reloads start is not searched for: each is queued as early as a limit on memory allows. That is
best. Memory is a matter of the program's order, not of times; a reload that is queued earlier ends
no later, and so do those behind it; and its memory is missed by nobody, since those needed before
it have theirs already, and those behind it come after it anyway. (Tests compare with all other
legal choices.)

So with a higher limit no reload starts later, and the time lost can only fall.

How early that is follows from sums. When reload r is queued those needed before it are there or
gone, so with A bytes as the backward begins, M those of reloads before r, and P(q) those of all
groups that are gone at place q, the device holds A + M - P(q) at every place q until r's own
backward. So r may be queued behind the last place q before its own with

    A + M + bytes of r - limit  >  P(q) + room of q

and a stack of the places that are lower than all behind them finds that place by halving.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from packgraph.offloading.plan import KEPT, CopySpeed, OffloadTrace

Moves = tuple[bool, ...]


@dataclass(frozen=True)
class Forwards:
    """Of C forwards: time that compute waits, float [C]; the most that the device holds until the
    backward begins, beyond the trace's rooms, int64 [C]; what a microbatch keeps afterwards, int64
    [C]."""

    exposed_us: np.ndarray
    peak_bytes: np.ndarray
    kept_bytes: np.ndarray


@dataclass(frozen=True)
class BackwardTimes:
    """Of one backward: time that compute waits, the most that the device holds beyond the trace's
    rooms, where reloads start."""

    exposed_us: float
    peak_bytes: int
    reload_at: tuple[int, ...]


class Passes:
    """A trace and a speed, read once."""

    def __init__(self, trace: OffloadTrace, speed: CopySpeed) -> None:
        groups = trace.groups
        self.trace = trace
        self.bytes = [group.bytes for group in groups]
        self.forward_us = [group.forward_us for group in groups]
        self.backward_us = [group.backward_us for group in groups]
        self.out_us = [speed.to_host_us(group) for group in groups]
        self.in_us = [speed.to_device_us(group) for group in groups]
        self.rooms = [
            trace.backward_rooms[index] for index in trace.backward_order
        ]  # in that order
        self.gone = trace.gone

    def forwards(self, moves: np.ndarray, in_flight: np.ndarray) -> Forwards:
        """What C forwards cost that give memory back as `with_releases` says. moves: bool [C,
        groups]. in_flight: int64 [C]."""
        count, rows = len(moves), np.arange(len(moves))
        kept = (~moves).astype(np.int64) @ np.array(self.bytes, dtype=np.int64)
        held = self.trace.other_bytes + (self.trace.slots - 1) * kept
        peak, waited, free_at = held.copy(), np.zeros(count), np.zeros(count)
        # Ends and bytes of the copies of a forward, oldest first; `queued` of them.
        ends, sizes = (
            np.zeros((count, len(self.bytes) + 1)),
            np.zeros((count, len(self.bytes) + 1), dtype=np.int64),
        )
        queued, released = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        for index, nbytes in enumerate(self.bytes):
            held += self.trace.arriving[index]
            np.maximum(peak, held, out=peak)
            moved, now = moves[:, index], self.forward_us[index] + waited
            free_at = np.where(moved, np.maximum(free_at, now) + self.out_us[index], free_at)
            ends[rows, queued], sizes[rows, queued] = free_at, nbytes
            queued += moved
            full = queued - released > in_flight
            waited += np.where(full, np.maximum(ends[rows, released] - now, 0.0), 0.0)
            now = self.forward_us[index] + waited
            full |= (released < queued) & (ends[rows, released] <= now)
            while full.any():
                held -= np.where(full, sizes[rows, released], 0)
                released += full
                full = (released < queued) & (ends[rows, released] <= now)
        after = self.trace.other_bytes + self.trace.slots * kept - self.trace.first_room
        return Forwards(
            waited + np.maximum(free_at - self.trace.forward_us - waited, 0.0),
            np.maximum(np.maximum(peak - self.trace.room, after), self.trace.other_bytes),
            kept,
        )

    def backward(
        self, moves: Moves, kept: int, limit: int, most_us: float = float("inf")
    ) -> BackwardTimes | None:
        """What the backward of `moves` costs, with reloads as early as `limit` bytes allow, beyond
        the trace's rooms.

        A reload that its own backward has to start gets its memory beyond the limit, too: compare
        `peak_bytes`. None as soon as compute waits for more than `most_us`.
        """
        begins = self.trace.other_bytes + self.trace.slots * kept
        reload_at, coming = (
            [KEPT] * len(moves),
            [0] * len(moves),
        )  # bytes by the place at which their reload is queued
        lowest, places, times = list[int](), list[int](), list[float]()
        waited = free_at = 0.0
        needed = begins - limit
        for place, index in enumerate(self.trace.backward_order):
            now = self.backward_us[index] + waited
            times.append(now)
            if moves[index]:
                needed += self.bytes[index]
                behind = bisect_left(lowest, needed)
                start = places[behind - 1] + 1 if behind else 0
                coming[start] += self.bytes[index]
                reload_at[index] = self.trace.backward_order[start]
                free_at = (free_at if free_at > times[start] else times[start]) + self.in_us[index]
                if free_at > now:
                    waited += free_at - now
                    if waited > most_us:
                        return None
            bound = self.gone[place] + self.rooms[place]
            while lowest and lowest[-1] >= bound:
                lowest.pop()
                places.pop()
            lowest.append(bound)
            places.append(place)
        held = (
            begins + come - gone - room
            for come, gone, room in zip(accumulate(coming), self.gone, self.rooms)
        )
        peak = max(self.trace.other_bytes, begins - self.trace.first_room, *held)
        return BackwardTimes(waited, peak, tuple(reload_at))
