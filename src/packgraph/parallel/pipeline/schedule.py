"""Pipeline schedules: which rank runs which forward and backward, in which order, when, and in
which slot.

Stages are numbered along the model; stage s lives on rank s % ranks and is that rank's chunk s //
ranks. A schedule is one row of compute actions per rank. It says nothing about time: `simulate`
does, and whoever executes a row waits for what the next action needs.

    1F1B, 2 ranks, 3 microbatches            warm-up | one forward, one backward | rest
    rank 0   F0    F1 B0    F2 B1    B2
    rank 1         F0 B0    F1 B1    F2 B2

Invariants: a row runs the forwards of a chunk in the order 0, 1, 2, ..., and its backwards in the
same order. Any number of microbatches from 1 on is legal, and none needs more slots than full
groups do (see `_row`).

`simulate` finds when each action runs, if every rank starts it as soon as its inputs are there:

    F of stage s waits for    F of stage s-1 (its activations)
    B of stage s waits for    F of stage s, and B of stage s+1 (its gradients)
    every action waits for    the one before it in its rank's row

Exact, and so the test of a schedule: one that cannot go on is an error that names what each rank
waits for.

A microbatch owns a slot of a chunk from its forward to its backward there. Graphs are captured per
slot, so the number of slots is fixed before the microbatch counts of later steps are known: it must
suffice for every legal count, and one too many is memory wasted.

    rank 0 of 2, 1F1B     F0    F1    B0    F2    B1    F3    B2    B3
    slot                  0     1     0     0     1     1     0     1

`to_csv` writes torch's vocabulary, one line per rank: 0F0,0F1,0B0,0B1, which
torch.distributed.pipelining reads ("compute_only").

`make_rows` puts sends and receives between the actions. Both ends of a transfer can be made to wait
for each other: a device that is drained (a kernel loaded at its first use, memory given back) waits
for every transfer that was started on it. A receive started too early then waits for data that this
very rank has yet to cause; a send started before its receiver gets there keeps the sender waiting
too. So all runs and transfers get one common order, and each rank's row is its part of it:

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

Kind = Literal["F", "B"]
Owner = tuple[int, int, int]
What = Literal["RUN", "SEND", "RECV"]
Rows = tuple[tuple["Op", ...], ...]


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """The forward ("F") or backward ("B") of one microbatch in one stage; written as torch does:
    2F0 is stage 2."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Compute actions per rank, in order. `chunks` are the stages of one rank, so there are ranks *
    chunks stages."""

    ranks: int
    chunks: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return stage % self.ranks

    def chunk_of(self, stage: int) -> int:
        """The index of `stage` among the chunks of its rank."""
        return stage // self.ranks


def legal_microbatches(ranks: int, chunks: int, group: int | None, microbatches: int) -> list[str]:
    """Every reason why there is no schedule for these numbers; empty when there is one."""
    sizes = {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}
    if group is not None:
        sizes["group"] = group
    errors = [
        f"{name} must be a whole number of at least 1, got {size!r}"
        for name, size in sizes.items()
        if not isinstance(size, int) or isinstance(size, bool) or size < 1
    ]
    if not errors and group is not None and chunks > 1 and group < ranks:
        errors.append(
            f"group ({group}) must be at least ranks ({ranks}): with fewer microbatches of one "
            "chunk in a "
            "row, ranks can wait for each other for ever; leave group out"
        )
    return errors


def make_schedule(ranks: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """1F1B for one chunk per rank, interleaved 1F1B for several.

    group: microbatches that a chunk runs in a row before the next chunk's turn, default `ranks`; it
    must not be smaller and has no meaning for one chunk. Raises ValueError with all reasons when
    there is no such schedule.

    Sources: PipeDream-Flush (arXiv 2006.09503) and interleaving (arXiv 2104.04473). Rows equal
    those of torch's Schedule1F1B and ScheduleInterleaved1F1B wherever these accept the numbers.
    """
    errors = legal_microbatches(ranks, chunks, group, microbatches)
    if errors:
        raise ValueError("this schedule is not possible:\n  - " + "\n  - ".join(errors))
    size = 1 if chunks == 1 else min(ranks if group is None else group, microbatches)
    return Schedule(
        ranks,
        chunks,
        microbatches,
        tuple(_row(rank, ranks, chunks, size, microbatches) for rank in range(ranks)),
    )


def _row(rank: int, ranks: int, chunks: int, group: int, microbatches: int) -> tuple[Action, ...]:
    """The row for full groups of microbatches, with those that do not exist struck out.

    Striking out a microbatch takes nothing away that another one waits for, so the rest cannot
    deadlock, keeps its order and has no more microbatches in flight. (To give a short last group
    turns of its own, as Megatron does, can deadlock below `ranks` microbatches, takes more slots in
    late chunks, and never ends earlier: see the tests.)
    """
    rounds = -(-microbatches // group)
    turns = [
        (microbatch, chunk)
        for start in range(0, rounds * group, group)
        for chunk in range(chunks)
        for microbatch in range(start, start + group)
    ]
    warmup = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * group
    row = []
    for step in range(len(turns) + warmup):
        if step < len(turns):
            microbatch, chunk = turns[step]
            row.append(Action("F", chunk * ranks + rank, microbatch))
        if step >= warmup:
            microbatch, chunk = turns[step - warmup]
            row.append(Action("B", (chunks - 1 - chunk) * ranks + rank, microbatch))
    return tuple(action for action in row if action.microbatch < microbatches)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, [rank][position in its row], in units of the costs given."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(max(row) for row in self.ends)

    @property
    def bubble_share(self) -> float:
        """The part of all ranks' time in which they wait, 0 to 1."""
        busy = sum(end - start for row in zip(self.starts, self.ends) for start, end in zip(*row))
        return 1 - busy / (self.makespan * self.schedule.ranks)


def simulate(
    schedule: Schedule,
    forward_cost: float = 1,
    backward_cost: float = 2,
    transfer_cost: float = 0,
    microbatch_costs: Sequence[float] | None = None,
) -> Timeline:
    """Run `schedule` on paper.

    transfer_cost: time between the end of an action and the arrival of its result on another rank.
    microbatch_costs: factors on both costs per microbatch, such as the tokens of their buckets.
    Raises ValueError when the ranks wait for each other for ever, and for costs that are not
    positive.
    """
    errors = []
    if min(forward_cost, backward_cost, *(microbatch_costs or [1])) <= 0 or transfer_cost < 0:
        errors.append("costs must be positive")
    if microbatch_costs is not None and len(microbatch_costs) != schedule.microbatches:
        errors.append(
            f"there are {len(microbatch_costs)} costs for {schedule.microbatches} microbatches"
        )
    if errors:
        raise ValueError("this schedule cannot run:\n  - " + "\n  - ".join(errors))
    factors = [1.0] * schedule.microbatches if microbatch_costs is None else list(microbatch_costs)

    def cost(action: Action) -> float:
        base = forward_cost if action.kind == "F" else backward_cost
        return base * factors[action.microbatch]

    enough = [[len(row)] * schedule.chunks for row in schedule.rows]
    line = _TimeLine(schedule, enough, cost, transfer_cost)
    waiting = [row[len(line.ends[rank]) :] for rank, row in enumerate(schedule.rows)]
    if any(waiting):
        raise ValueError(_deadlock(schedule, waiting))
    return Timeline(schedule, tuple(map(tuple, line.starts)), tuple(map(tuple, line.ends)))


def needed(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions whose results `action` reads."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    own = Action("F", stage, microbatch)
    return (own, Action("B", stage + 1, microbatch)) if stage + 1 < schedule.stages else (own,)


def _deadlock(schedule: Schedule, waiting: Sequence[Sequence[Action]]) -> str:
    """The actions that ranks cannot begin, in words. waiting: by rank, all that have not run."""
    left, lines = {action for row in waiting for action in row}, []
    for rank, row in enumerate(waiting):
        if row:
            absent = [
                f"{source} of rank {schedule.rank_of(source.stage)}"
                for source in needed(schedule, row[0])
                if source in left
            ]
            lines.append(f"rank {rank} is at {row[0]}, which waits for {' and '.join(absent)}")
    return "this schedule cannot run: the ranks wait for each other\n  - " + "\n  - ".join(lines)


def peak_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """[rank][chunk] -> the largest number of microbatches between their forward and backward at one
    time."""
    peaks = [[0] * schedule.chunks for _ in schedule.rows]
    for (rank, stage, _), slot in assign_slots(schedule).items():
        chunk = schedule.chunk_of(stage)
        peaks[rank][chunk] = max(peaks[rank][chunk], slot + 1)
    return tuple(map(tuple, peaks))


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


def to_csv(schedule: Schedule) -> str:
    """One line per rank, each ended by a newline."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


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
    """The rows of `schedule` with their transfers, in the order of a simulation where forwards take
    1, backwards 2, transfers nothing. slots: [rank][chunk], as by `slot_counts`.

    Raises ValueError naming what each rank waits for, when there are too few slots or the schedule
    cannot run.
    """
    line = _TimeLine(schedule, slots, lambda action: 1 if action.kind == "F" else 2)
    waiting = [
        f"rank {rank} stays at {row[len(ends)]}"
        for rank, (row, ends) in enumerate(zip(schedule.rows, line.ends, strict=True))
        if len(ends) < len(row)
    ]
    if waiting:
        raise ValueError("this schedule cannot run with these slots: " + ", ".join(waiting))
    return tuple(map(tuple, line.order))


class _TimeLine:
    """The simulation that puts everything into one order. `order`, `starts`, `ends`: by rank; those
    of actions that cannot run are missing."""

    def __init__(
        self,
        schedule: Schedule,
        slots: Sequence[Sequence[int]],
        cost: Callable[[Action], float],
        transfer_cost: float = 0,
    ) -> None:
        self.schedule, self.transfer_cost = schedule, transfer_cost
        self.free = [list(counts) for counts in slots]
        self.done: set[Action] = set()
        self.arrivals: dict[Action, float] = {}  # of what an action needs from another rank
        # Activations that wait for a slot, by the rank and chunk that shall receive them.
        self.unsent: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.order: list[list[Op]] = [[] for _ in schedule.rows]
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        # Ends of actions, by rank; number of ranks = something arrives.
        self.events = [(0.0, schedule.ranks)]
        while self.events:
            self.now, rank = heapq.heappop(self.events)
            if rank < schedule.ranks:
                self.ends[rank].append(self.now)
                self._finish(rank, schedule.rows[rank][len(self.ends[rank]) - 1])
            if self.events and self.events[0][0] <= self.now:
                continue  # first all that end now: their transfers come before new runs
            for rank, row in enumerate(schedule.rows):
                place = len(self.starts[rank])
                is_idle = place == len(self.ends[rank]) < len(row)
                if is_idle and self._can_start(rank, row[place]):
                    self.starts[rank].append(self.now)
                    heapq.heappush(self.events, (self.now + cost(row[place]), rank))

    def _can_start(self, rank: int, action: Action) -> bool:
        sources = needed(self.schedule, action)
        sent = [source for source in sources if receiver_of(self.schedule, source) == action]
        if any(source not in self.done for source in sources) or (
            sent and self.arrivals.get(action, inf) > self.now
        ):
            return False
        return action.kind == "B" or bool(sent) or self._take_slot(rank, action)

    def _finish(self, rank: int, action: Action) -> None:
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
        has_slot = self.free[rank][chunk] > 0
        self.free[rank][chunk] -= has_slot
        return has_slot

    def _transfer(self, action: Action, receiver: Action) -> None:
        self.arrivals[receiver] = self.now + self.transfer_cost
        heapq.heappush(self.events, (self.arrivals[receiver], self.schedule.ranks))
        self.order[self.schedule.rank_of(action.stage)].append(Op("SEND", action))
        self.order[self.schedule.rank_of(receiver.stage)].append(Op("RECV", receiver))
