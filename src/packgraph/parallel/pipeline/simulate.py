"""When each action of a schedule runs, if every rank starts it as soon as its inputs are there.

    F of stage s waits for    F of stage s-1 (its activations)
    B of stage s waits for    F of stage s, and B of stage s+1 (its gradients)
    every action waits for    the one before it in its rank's row

Exact, and so the test of a schedule: one that cannot go on is an error that names what each rank
waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from packgraph.parallel.pipeline.schedule import Action, Schedule, schedule_errors


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
