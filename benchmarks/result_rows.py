"""Rows that were written before: read from files, the newest of each kind, and as tables of
Markdown."""

import json
import subprocess
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from packgraph.bench.rows import Column, Row

# What tells rows apart; a row that has the same of all these as a later one is older.
IDENTITY = (
    "benchmark",
    "part",
    "way",
    "model",
    "layers",
    "tokens",
    "attention_asked",
    "places",
    "packed",
    "buckets",
    "compile",
    "device",
    "microbatches",
    "ranks",
    "chunks",
    "connections",
    "longest",
    "lora",
    "kernel",
    "work",
    "recompute",
)


def read_rows(files: Iterable[Path]) -> list[Row]:
    """All rows of `files` (one JSON object per line) that could be measured.

    Objects of another kind (logs of scripts) are left out. Raises ValueError for a line that is no
    JSON object.
    """
    found: list[Row] = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number} is no JSON object but {row!r}")
            if "benchmark" in row and row.get("reason") is None:
                found.append(row)
    return found


def newest(rows: Iterable[Row], benchmark: str) -> list[Row]:
    """The last row of each kind, of one benchmark, in the order in which the kinds came first."""
    kinds: dict[Hashable, Row] = {}
    for row in rows:
        if row["benchmark"] == benchmark:
            kinds[
                tuple(
                    str(row.get(name))
                    for name in IDENTITY
                    if name != "buckets" or benchmark != "padding"
                )
            ] = row
    return list(kinds.values())


def step_kinds(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of the step benchmark that may stand in one table: by model with its depth, part and
    attention."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        model = f"{row['model']}-{row['layers']}-layers"
        found.setdefault(
            (model, row.get("part", "model"), row.get("attention_asked", "auto")), []
        ).append(row)
    return found


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A table of Markdown; no line at all when there are no rows."""
    if not rows:
        return ""
    lines = [
        [name for name, _ in columns],
        ["---"] * len(columns),
        *([cell(row).replace("|", "/") for _, cell in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def commit_of_source() -> str:
    """The commit of the folder this runs from, with `-dirty` for local changes; `unknown` outside a
    git checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "unknown"
    try:
        git = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return "unknown"
    return git.stdout.strip() or "unknown"
