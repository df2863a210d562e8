"""A plan of offloading run on paper: when each copy runs, when compute waits for one, and what the
device holds then.

This is the specification of the rules in `offloading/plan.py`, of one microbatch whose backward
follows its forward. Of other microbatches in flight each holds what the plan keeps:

    memory = other_bytes + (slots - 1) * kept bytes of a microbatch + curve of this one

which is exact, since a microbatch's copies to the host end with its forward, and its reloads with
its backward.

`Passes` has the figures of many plans of one trace, fast: a twin of `simulate_offload` that keeps
no record of events.

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
from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from packgraph.offloading.plan import KEPT, CopySpeed, OffloadPlan, OffloadTrace, plan_errors

Moves = tuple[bool, ...]


@dataclass(frozen=True)
class PlannedCopy:
    """One copy of a group. Times in us from the start of the forward."""

    group: int
    to_host: bool
    queued: float
    start: float
    end: float


@dataclass(frozen=True)
class Wait:
    """Compute waits for the copy of a group."""

    group: int
    to_host: bool
    start: float
    end: float


class OffloadTimeline:
    """Timeline of a microbatch, in us from the start of the forward.

    copies: in the order in which they were queued. waits: of compute, those of no length left out.
    commits, backwards: per group, when its forward has ended and when its backward starts, waits
    included. forward_end, end: of the microbatch's forward and of all. memory: (time, bytes from
    then on), in the order of the program. rooms: by how much each of these may exceed the peak.
    other_bytes: of the trace, below which no peak can be.
    """

    def __init__(self, trace: OffloadTrace, speed: CopySpeed, plan: OffloadPlan) -> None:
        self.copies: list[PlannedCopy] = []
        self.waits: list[Wait] = []
        self.commits, self.backwards = [0.0] * len(trace.groups), [0.0] * len(trace.groups)
        kept = sum(group.bytes for group, moves in zip(trace.groups, plan.moves) if not moves)
        self.other_bytes = trace.other_bytes
        self.memory = [(0.0, trace.other_bytes + (trace.slots - 1) * kept)]
        self._room = trace.room  # of the program's present place
        self.rooms = [self._room]
        self._trace, self._speed, self._plan = trace, speed, plan
        self._waited = 0.0
        self._free_at = {True: 0.0, False: 0.0}  # of the copy engines, by to_host
        self._in_flight: deque[PlannedCopy] = deque()
        self._on_host: dict[int, float] = {}
        self._reloads: dict[int, PlannedCopy] = {}
        self._due: dict[int, list[int]] = {}
        for group in trace.backward_order:
            if plan.moves[group]:
                self._due.setdefault(plan.reload_at[group], []).append(group)
        for index in range(len(trace.groups)):
            self._commit(index)
        self._give_back(trace.forward_us + self._waited, 0)
        self._room = trace.first_room
        self.rooms[-1] = min(self.rooms[-1], self._room)  # what the backward begins with, too
        self.forward_end = trace.forward_us + self._waited
        running: list[int] = []
        for index in trace.backward_order:
            if running and trace.blocks[running[-1]] != trace.blocks[index]:
                self._free(running, self._backward_time(trace.groups[index].backward_us))
            self._start_backward(index)
            running.append(index)
        self.end = self._backward_time(trace.backward_us)
        self._free(running, self.end)

    @property
    def exposed_us(self) -> float:
        """Time that compute waits."""
        return sum(wait.end - wait.start for wait in self.waits)

    @property
    def peak_bytes(self) -> int:
        """The most that the device holds beyond the rooms."""
        return max(
            self.other_bytes, *(held - room for (_, held), room in zip(self.memory, self.rooms))
        )

    def copy_us(self, to_host: bool) -> float:
        """Time that copies of one direction take together."""
        return sum(copy.end - copy.start for copy in self.copies if copy.to_host == to_host)

    def _commit(self, index: int) -> None:
        forward_us, release_at = self._trace.groups[index].forward_us, self._plan.release_at
        now = forward_us + self._waited
        self._hold(now, self._trace.arriving[index])
        if self._plan.moves[index]:
            self._in_flight.append(self._queue(index, True, now))
            now = self._give_back(now, self._plan.in_flight)
        if release_at:
            due = sum(KEPT < release_at[copy.group] <= index for copy in self._in_flight)
            self._give_back(now, len(self._in_flight) - due)
        self.commits[index] = forward_us + self._waited

    def _start_backward(self, index: int) -> None:
        group = self._trace.groups[index]
        now = self._backward_time(group.backward_us)
        if self._room != self._trace.backward_rooms[index]:
            self._room = self._trace.backward_rooms[index]
            self._hold(now, 0)
        for other in self._due.get(index, ()):
            self._hold(now, self._trace.groups[other].bytes)
            self._reloads[other] = self._queue(other, False, now)
        if self._plan.moves[index]:
            self._wait(self._reloads[index], now)
        self.backwards[index] = self._backward_time(group.backward_us)

    def _backward_time(self, us: float) -> float:
        return self._trace.forward_us + us + self._waited

    def _free(self, running: list[int], now: float) -> None:
        if running:
            self._hold(now, -sum(self._trace.groups[index].bytes for index in running))
        running.clear()

    def _give_back(self, now: float, left: int) -> float:
        """The time at which compute goes on."""
        while len(self._in_flight) > left:
            copy = self._in_flight.popleft()
            now = self._wait(copy, now)
            self._hold(now, -self._trace.groups[copy.group].bytes)
            self._on_host[copy.group] = copy.end
        return now

    def _queue(self, index: int, to_host: bool, now: float) -> PlannedCopy:
        group = self._trace.groups[index]
        start = max(now, self._free_at[to_host], 0.0 if to_host else self._on_host[index])
        end = start + (
            self._speed.to_host_us(group) if to_host else self._speed.to_device_us(group)
        )
        self._free_at[to_host] = end
        self.copies.append(PlannedCopy(index, to_host, now, start, end))
        return self.copies[-1]

    def _wait(self, copy: PlannedCopy, now: float) -> float:
        """The time at which compute goes on."""
        if copy.end <= now:
            return now
        self.waits.append(Wait(copy.group, copy.to_host, now, copy.end))
        self._waited += copy.end - now
        return copy.end

    def _hold(self, now: float, nbytes: int) -> None:
        self.memory.append((now, self.memory[-1][1] + nbytes))
        self.rooms.append(self._room)


def simulate_offload(trace: OffloadTrace, speed: CopySpeed, plan: OffloadPlan) -> OffloadTimeline:
    """Run `plan` on `trace`. Raises ValueError with all reasons when the plan is not one of this
    trace."""
    if errors := plan_errors(trace, plan):
        raise ValueError("this plan does not fit its trace:\n  - " + "\n  - ".join(errors))
    return OffloadTimeline(trace, speed, plan)


def with_releases(trace: OffloadTrace, speed: CopySpeed, plan: OffloadPlan) -> OffloadPlan:
    """`plan` with memory that is given back at the first commit at which its copy has ended by
    itself.

    Nothing is waited for that was not before, so no time changes. Raises ValueError like
    `simulate_offload`.
    """
    timeline = simulate_offload(trace, speed, replace(plan, release_at=()))
    ends = {copy.group: copy.end for copy in timeline.copies if copy.to_host}
    # Times of commits only rise, so the first one not before the end is found by halving.
    places = {group: max(group, bisect_left(timeline.commits, end)) for group, end in ends.items()}
    release_at = tuple(
        place if (place := places.get(index, KEPT)) < len(trace.groups) else KEPT
        for index in range(len(trace.groups))
    )
    return replace(plan, release_at=release_at)


def predicted(trace: OffloadTrace, speed: CopySpeed, plan: OffloadPlan) -> OffloadPlan:
    """`plan` with all predicted figures. Raises ValueError like `simulate_offload`."""
    timeline = simulate_offload(trace, speed, plan)
    moved = sum(group.bytes for group, moves in zip(trace.groups, plan.moves) if moves)
    return replace(
        plan,
        peak_bytes=timeline.peak_bytes,
        kept_peak_bytes=trace.kept_peak_bytes,
        moved_bytes=moved,
        host_bytes=trace.slots * moved,
        copy_us=timeline.copy_us(True) + timeline.copy_us(False),
        exposed_us=timeline.exposed_us,
        compute_us=trace.compute_us,
    )


@dataclass(frozen=True)
class Forwards:
    """Costs of C forwards: time that compute waits, float [C]; the most that the device holds until
    the backward begins, beyond the trace's rooms, int64 [C]; what a microbatch keeps afterwards,
    int64 [C]."""

    exposed_us: np.ndarray
    peak_bytes: np.ndarray
    kept_bytes: np.ndarray


@dataclass(frozen=True)
class BackwardTimes:
    """Costs of one backward: time that compute waits, the most that the device holds beyond the
    trace's rooms, and where reloads start."""

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
        """Computes the costs of C forwards that give memory back as `with_releases` says. moves:
        bool [C, groups]. in_flight: int64 [C]."""
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
        """Computes the costs of the backward of `moves`, with reloads as early as `limit` bytes
        allow, beyond the trace's rooms.

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
