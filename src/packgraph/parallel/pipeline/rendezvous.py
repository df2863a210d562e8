"""Schedule of sends and receives between the actions of a pipeline, so that no order of waiting can
stop the ranks.

Both ends of a transfer can be made to wait for each other: a device that is drained (a kernel
loaded at its first use, memory given back) waits for every transfer that was started on it. A
receive started too early then waits for data that this very rank has yet to cause; a send started
before its receiver gets there keeps the sender waiting too. So all runs and transfers get one
common order, and each rank's row is its part of it:

    all     0F0  0->1  0F1  1F0  1B0  1->0 ...      one after another: possible, so it cannot
                                                    deadlock
    rank 0  0F0  0SEND_F0  0F1  0RECV_B0 ...        whoever waits at a transfer waits for what comes
                                                    earlier in "all"
    rank 1  1RECV_F0  1F0  1B0  1SEND_B0 ...

Invariants: rows run to their end even if every send and every receive blocks its rank until the
other side is there, and even with a single communicator that serves its transfers in order. A chunk
never holds more microbatches, from the start of the receive to the end of the backward, than it has
slots. The order is that of a simulated time line, in which a transfer happens as soon as its data
are there and its receiver has a slot, so waiting does not make a step longer.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from packgraph.parallel.pipeline.schedule import Action, Schedule, needed

What = Literal["RUN", "SEND", "RECV"]
Rows = tuple[tuple["Op", ...], ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One step of a rank: run an action, send what it made, or receive what it needs. Written as
    torch does: 0SEND_F1.

    action: the one that runs, that made what is sent, or that needs what is received.
    """

    what: What
    action: Action

    def __str__(self) -> str:
        if self.what == "RUN":
            return str(self.action)
        return f"{self.action.stage}{self.what}_{self.action.kind}{self.action.microbatch}"


def receiver_of(schedule: Schedule, action: Action) -> Action | None:
    """The action on another rank that needs what `action` makes; None at both ends of the model."""
    step = 1 if action.kind == "F" else -1
    if schedule.ranks == 1 or not 0 <= action.stage + step < schedule.stages:
        return None
    return Action(action.kind, action.stage + step, action.microbatch)


def make_rows(schedule: Schedule, slots: Sequence[Sequence[int]]) -> Rows:
    """The rows of `schedule` with their transfers. slots: [rank][chunk], as by `slot_counts`.

    Raises ValueError naming what each rank waits for, when there are too few slots or the schedule
    cannot run.
    """
    return _TimeLine(schedule, slots).rows()


class _TimeLine:
    """The simulation that puts everything into one order: forwards take 1, backwards 2, transfers
    nothing."""

    def __init__(self, schedule: Schedule, slots: Sequence[Sequence[int]]) -> None:
        self.schedule = schedule
        self.free = [list(counts) for counts in slots]
        self.done: set[Action] = set()
        self.received: set[Action] = set()
        # Activations that wait for a slot, by the rank and chunk that shall receive them.
        self.unsent: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.position = [0] * schedule.ranks
        self.running: list[Action | None] = [None] * schedule.ranks
        self.ends: list[tuple[float, int]] = []
        self.order: list[list[Op]] = [[] for _ in range(schedule.ranks)]

    def rows(self) -> Rows:
        self._start(0.0)
        while self.ends:
            now, rank = heapq.heappop(self.ends)
            self._finish(rank)
            if (
                not self.ends or self.ends[0][0] > now
            ):  # first all that end now: their transfers come before new runs
                self._start(now)
        waiting = [
            row[place] if place < len(row) else None
            for place, row in zip(self.position, self.schedule.rows, strict=True)
        ]
        if any(waiting):
            raise ValueError(
                "this schedule cannot run with these slots: "
                + ", ".join(
                    f"rank {rank} stays at {action}"
                    for rank, action in enumerate(waiting)
                    if action is not None
                )
            )
        return tuple(map(tuple, self.order))

    def _start(self, now: float) -> None:
        for rank, row in enumerate(self.schedule.rows):
            if self.running[rank] is None and self.position[rank] < len(row):
                action = row[self.position[rank]]
                if self._can_start(rank, action):
                    self.running[rank] = action
                    self.position[rank] += 1
                    heapq.heappush(self.ends, (now + (1 if action.kind == "F" else 2), rank))

    def _can_start(self, rank: int, action: Action) -> bool:
        sources = needed(self.schedule, action)
        sent = [source for source in sources if receiver_of(self.schedule, source) == action]
        if any(source not in self.done for source in sources) or (
            sent and action not in self.received
        ):
            return False
        return action.kind == "B" or bool(sent) or self._take_slot(rank, action)

    def _finish(self, rank: int) -> None:
        action = self.running[rank]
        assert action is not None
        self.running[rank] = None
        self.done.add(action)
        self.order[rank].append(Op("RUN", action))
        receiver = receiver_of(self.schedule, action)
        if receiver is not None and action.kind == "B":
            self._transfer(action, receiver)
        elif receiver is not None:
            place = self.schedule.rank_of(receiver.stage), self.schedule.chunk_of(receiver.stage)
            self.unsent[place].append(action)
            self._deliver(*place)
        if action.kind == "B":
            chunk = self.schedule.chunk_of(action.stage)
            self.free[rank][chunk] += 1
            self._deliver(rank, chunk)

    def _deliver(self, rank: int, chunk: int) -> None:
        """Send waiting activations to a chunk while it has slots."""
        senders = self.unsent[rank, chunk]
        while senders:
            receiver = receiver_of(self.schedule, senders[0])
            assert receiver is not None
            if not self._take_slot(rank, receiver):
                return
            self._transfer(senders.popleft(), receiver)

    def _take_slot(self, rank: int, action: Action) -> bool:
        chunk = self.schedule.chunk_of(action.stage)
        self.free[rank][chunk] -= 1
        if self.free[rank][chunk] < 0:
            self.free[rank][chunk] = 0
            return False
        return True

    def _transfer(self, action: Action, receiver: Action) -> None:
        self.received.add(receiver)
        self.order[self.schedule.rank_of(action.stage)].append(Op("SEND", action))
        self.order[self.schedule.rank_of(receiver.stage)].append(Op("RECV", receiver))
