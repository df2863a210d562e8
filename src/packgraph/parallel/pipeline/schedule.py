"""Pipeline schedules: which rank runs which forward and backward, in which order.

Stages are numbered along the model; stage s lives on rank s % ranks and is that rank's chunk s //
ranks. A schedule is one row of compute actions per rank. It says nothing about time: `simulate`
does, and whoever executes a row waits for what the next action needs.

    1F1B, 2 ranks, 3 microbatches            warm-up | one forward, one backward | rest
    rank 0   F0    F1 B0    F2 B1    B2
    rank 1         F0 B0    F1 B1    F2 B2

Invariants: a row runs the forwards of a chunk in the order 0, 1, 2, ..., and its backwards in the
same order. Any number of microbatches from 1 on is legal, and none needs more slots than full
groups do (see `_row`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]


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
