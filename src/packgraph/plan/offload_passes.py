"""The figures of many plans of one trace, fast: twins of `plan/offload_simulate.py` that keep no record of events.

Forward and backward are judged apart, since all copies to the host end with the forward. Where reloads start is not
searched for: each is queued as early as a limit on memory allows. That is best. Memory is a matter of the program's
order, not of times; a reload that is queued earlier ends no later, and so do those behind it; and its memory is missed
by nobody, since those needed before it have theirs already, and those behind it come after it anyway. (Tests compare
with all other legal choices.)

So with a higher limit no reload starts later, and the time lost can only fall.
"""
from collections import deque
from dataclasses import dataclass

from packgraph.plan.offload import KEPT, CopySpeed, OffloadTrace

Moves = tuple[bool, ...]


@dataclass(frozen=True)
class Forward:
    """Of one forward: time that compute waits, the most that the device holds, what a microbatch keeps afterwards."""

    exposed_us: float
    peak_bytes: int
    kept_bytes: int


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

    def kept(self, moves: Moves) -> int:
        """Bytes that one microbatch keeps on the device between its forward and its backward."""
        return sum(nbytes for nbytes, moved in zip(self.bytes, moves) if not moved)

    def base(self, kept: int) -> int:
        """Bytes that are there besides the microbatch that runs."""
        return self.trace.other_bytes + (self.trace.slots - 1) * kept

    def forward(self, moves: Moves, in_flight: int) -> Forward:
        """What the forward of `moves` costs."""
        kept = self.kept(moves)
        held = peak = self.base(kept)
        waited = free_at = 0.0
        pending: deque[tuple[float, int]] = deque()
        for at, nbytes, out_us, moved in zip(self.forward_us, self.bytes, self.out_us, moves):
            held += nbytes
            if held > peak:
                peak = held
            if not moved:
                continue
            now = at + waited
            free_at = (free_at if free_at > now else now) + out_us
            pending.append((free_at, nbytes))
            if len(pending) > in_flight:
                end, given_back = pending.popleft()
                held -= given_back
                if end > now:
                    waited += end - now
        return Forward(waited + max(free_at - self.trace.forward_us - waited, 0.0), peak, kept)

    def backward(self, moves: Moves, kept: int, limit: int, most_us: float = float("inf")) -> Backward | None:
        """What the backward of `moves` costs, with reloads as early as `limit` bytes allow.

        A reload that its own backward has to start gets its memory beyond the limit, too: compare `peak_bytes`. None as
        soon as compute waits for more than `most_us`.
        """
        order, nbytes, in_us = self.trace.backward_order, self.bytes, self.in_us
        reloads = [index for index in order if moves[index]]
        reload_at, ends = [KEPT] * len(nbytes), [0.0] * len(nbytes)
        held = peak = self.base(kept) + kept
        waited = free_at = 0.0
        following, before = 0, 0
        for index in order:
            now = self.backward_us[index] + waited
            held -= before
            before = nbytes[index]
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
