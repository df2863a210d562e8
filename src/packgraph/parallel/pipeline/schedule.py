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

`to_csv` writes torch's vocabulary, one line per rank: 0F0,0F1,0B0,0B1. torch.distributed.pipelining
reads and writes the same ("compute_only"), so a schedule can be carried to and fro.
"""

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]
Owner = tuple[int, int, int]
_ACTION = re.compile(r"(\d+)([FB])(\d+)")
_KINDS: dict[str, Kind] = {"F": "F", "B": "B"}


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


def schedule_errors(schedule: Schedule) -> list[str]:
    """Everything that is wrong with the set of actions: unknown, misplaced, doubled, missing; empty
    when complete."""
    if len(schedule.rows) != schedule.ranks:
        return [
            f"there must be one row per rank: {schedule.ranks} ranks, {len(schedule.rows)} rows"
        ]
    errors: list[str] = []
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.kind not in ("F", "B") or not (
                0 <= action.stage < schedule.stages
                and 0 <= action.microbatch < schedule.microbatches
            ):
                errors.append(
                    f"rank {rank}: {action} is no action of {schedule.stages} stages and "
                    f"{schedule.microbatches} microbatches"
                )
            elif schedule.rank_of(action.stage) != rank:
                errors.append(
                    f"rank {rank}: {action} belongs to rank {schedule.rank_of(action.stage)}, "
                    "which holds its stage"
                )
            elif action in seen:
                errors.append(f"rank {rank}: {action} stands twice")
            seen.add(action)
    missing = [str(action) for action in _all_actions(schedule) if action not in seen]
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        errors.append(
            f"missing {len(missing)} of the {2 * schedule.stages * schedule.microbatches} actions: "
            f"{shown}"
        )
    return errors


def _all_actions(schedule: Schedule) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            yield Action("F", stage, microbatch)
            yield Action("B", stage, microbatch)


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
    Raises ValueError when actions are missing, when the ranks wait for each other for ever, and for
    costs that are not positive.
    """
    _check(schedule, forward_cost, backward_cost, transfer_cost, microbatch_costs)
    factors = [1.0] * schedule.microbatches if microbatch_costs is None else list(microbatch_costs)
    done: dict[Action, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.rows]
    ends: list[list[float]] = [[] for _ in schedule.rows]
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(schedule.rows):
            while len(ends[rank]) < len(row):
                action = row[len(ends[rank])]
                sources = needed(schedule, action)
                if any(source not in done for source in sources):
                    break
                far = [
                    done[source] + (transfer_cost if schedule.rank_of(source.stage) != rank else 0)
                    for source in sources
                ]
                start = max([*far, *ends[rank][-1:], 0])
                cost = forward_cost if action.kind == "F" else backward_cost
                starts[rank].append(start)
                ends[rank].append(start + cost * factors[action.microbatch])
                done[action] = ends[rank][-1]
                moving = True
    waiting = [
        row[len(ended)] if len(ended) < len(row) else None
        for row, ended in zip(schedule.rows, ends)
    ]
    if any(waiting):
        raise ValueError(_deadlock(schedule, waiting, done))
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def needed(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions whose results `action` reads."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    own = Action("F", stage, microbatch)
    return (own, Action("B", stage + 1, microbatch)) if stage + 1 < schedule.stages else (own,)


def _check(
    schedule: Schedule,
    forward_cost: float,
    backward_cost: float,
    transfer_cost: float,
    microbatch_costs: Sequence[float] | None,
) -> None:
    errors = schedule_errors(schedule)
    if min(forward_cost, backward_cost, *(microbatch_costs or [1])) <= 0 or transfer_cost < 0:
        errors.append("costs must be positive")
    if microbatch_costs is not None and len(microbatch_costs) != schedule.microbatches:
        errors.append(
            f"there are {len(microbatch_costs)} costs for {schedule.microbatches} microbatches"
        )
    if errors:
        raise ValueError("this schedule cannot run:\n  - " + "\n  - ".join(errors))


def _deadlock(
    schedule: Schedule, waiting: Sequence[Action | None], done: dict[Action, float]
) -> str:
    lines = []
    for rank, action in enumerate(waiting):
        if action is not None:
            absent = [
                f"{source} of rank {schedule.rank_of(source.stage)}"
                for source in needed(schedule, action)
                if source not in done
            ]
            lines.append(f"rank {rank} is at {action}, which waits for {' and '.join(absent)}")
    return "this schedule cannot run: the ranks wait for each other\n  - " + "\n  - ".join(lines)


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


def to_csv(schedule: Schedule) -> str:
    """One line per rank, each ended by a newline."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def from_csv(text: str) -> Schedule:
    """Read what `to_csv` writes, or torch's compute-only rows; empty cells (torch's idle times) are
    left out.

    Raises ValueError with everything that is wrong, by line and column.
    """
    errors: list[str] = []
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.strip().splitlines(), start=1):
        row = []
        for column, cell in enumerate(line.split(","), start=1):
            word = cell.strip()
            match = _ACTION.fullmatch(word)
            if match:
                row.append(Action(_KINDS[match[2]], int(match[1]), int(match[3])))
            elif word:
                errors.append(
                    f"line {number}, cell {column}: {word!r} is no forward or backward such as 0F0 "
                    "or 0B0"
                )
        rows.append(tuple(row))
    actions = [action for row in rows for action in row]
    if not errors and not actions:
        errors.append("there are no actions in it")
    if not errors:
        chunks = -(-(1 + max(action.stage for action in actions)) // len(rows))
        microbatches = 1 + max(action.microbatch for action in actions)
        schedule = Schedule(len(rows), chunks, microbatches, tuple(rows))
        errors = schedule_errors(schedule)
        if not errors:
            return schedule
    raise ValueError("this text is not a schedule:\n  - " + "\n  - ".join(errors))
