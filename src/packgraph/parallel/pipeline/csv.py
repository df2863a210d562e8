"""Schedules as text in torch's vocabulary, one line per rank: 0F0,0F1,0B0,0B1.

torch.distributed.pipelining reads and writes the same ("compute_only"), so a schedule can be
carried to and fro.
"""

import re

from packgraph.parallel.pipeline.schedule import Action, Kind, Schedule, schedule_errors

_ACTION = re.compile(r"(\d+)([FB])(\d+)")
_KINDS: dict[str, Kind] = {"F": "F", "B": "B"}


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
