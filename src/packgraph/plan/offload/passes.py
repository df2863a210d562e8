"""The figures of many plans of one trace, fast: twins of `plan/offload/simulate.py` that keep no record of events.

Forwards are walked through all at once, in arrays of one number per plan; of backwards few are asked for.

Forward and backward are judged apart, since all copies to the host end with the forward. Where reloads start is not
searched for: each is queued as early as a limit on memory allows. That is best. Memory is a matter of the program's
order, not of times; a reload that is queued earlier ends no later, and so do those behind it; and its memory is missed
by nobody, since those needed before it have theirs already, and those behind it come after it anyway. (Tests compare
with all other legal choices.)

So with a higher limit no reload starts later, and the time lost can only fall.
"""
from dataclasses import dataclass

import numpy as np

from packgraph.plan.offload.plan import KEPT, CopySpeed, OffloadTrace

Moves = tuple[bool, ...]


@dataclass(frozen=True)
class Forwards:
    """Of C forwards: time that compute waits, float [C]; the most that the device holds, beyond the trace's room, int64
    [C]; what a microbatch keeps afterwards, int64 [C]."""

    exposed_us: np.ndarray
    peak_bytes: np.ndarray
    kept_bytes: np.ndarray


@dataclass(frozen=True)
class Backward:
    """Of one backward: time that compute waits, the most that the device holds, where reloads start."""

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

    def forwards(self, moves: np.ndarray, in_flight: np.ndarray) -> Forwards:
        """What C forwards cost that give memory back as `with_releases` says. moves: bool [C, groups]. in_flight: int64
        [C]."""
        count, rows = len(moves), np.arange(len(moves))
        kept = (~moves).astype(np.int64) @ np.array(self.bytes, dtype=np.int64)
        held = self.trace.other_bytes + (self.trace.slots - 1) * kept
        peak, waited, free_at = held.copy(), np.zeros(count), np.zeros(count)
        # Ends and bytes of the copies of a forward, oldest first; `queued` of them.
        ends, sizes = np.zeros((count, len(self.bytes) + 1)), np.zeros((count, len(self.bytes) + 1), dtype=np.int64)
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
        after = self.trace.other_bytes + self.trace.slots * kept
        return Forwards(waited + np.maximum(free_at - self.trace.forward_us - waited, 0.0),
                        np.maximum(peak - self.trace.room, after), kept)

    def backward(self, moves: Moves, kept: int, limit: int, most_us: float = float("inf")) -> Backward | None:
        """What the backward of `moves` costs, with reloads as early as `limit` bytes allow.

        A reload that its own backward has to start gets its memory beyond the limit, too: compare `peak_bytes`. None as
        soon as compute waits for more than `most_us`.
        """
        order, nbytes, in_us = self.trace.backward_order, self.bytes, self.in_us
        reloads = [index for index in order if moves[index]]
        reload_at, ends = [KEPT] * len(nbytes), [0.0] * len(nbytes)
        held = peak = self.trace.other_bytes + self.trace.slots * kept
        waited = free_at = 0.0
        following, before, blocks, block = 0, 0, self.trace.blocks, KEPT
        for index in order:
            now = self.backward_us[index] + waited
            if blocks[index] != block:
                held, before, block = held - before, 0, blocks[index]
            before += nbytes[index]
            while following < len(reloads):
                due = reloads[following]
                # What is needed now was not queued before only if there was no room.
                if held + nbytes[due] > limit and due != index:
                    break
                held += nbytes[due]
                free_at = (free_at if free_at > now else now) + in_us[due]
                ends[due] = free_at
                reload_at[due] = index
                following += 1
            if held > peak:
                peak = held
            if moves[index] and ends[index] > now:
                waited += ends[index] - now
                if waited > most_us:
                    return None
        return Backward(waited, peak, tuple(reload_at))
