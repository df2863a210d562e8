"""Ways of making something, checked in processes of their own: one that fails or hangs costs
nothing but its row.

    parent   check_apart(command, count, ...)  --  command --check 0 8 16 ...  -->   child
    report(numbers, check)
             rows by number                    <--  {"number": 0, "ok": true, ...} a line

A way is known by its number in a list that parent and child make alike. A child ends after a fault
on the device; the parent starts another one for what it left.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import triton
from moe_experts import Row, Session

from packgraph.bench.rows import FAILURES, why

FAILED = (*FAILURES, triton.TritonError)


def keep(session: Session, show: bool, **row: object) -> None:
    """Write a row to the file, and print it if `show`."""
    if show:
        session.write(**row)
    elif session.out is not None:
        with session.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | session.shared) + "\n")


def report(numbers: Sequence[int], check: Callable[[int], Row]) -> None:
    """In a child: print a row for each number, and end where the device takes no more. check: `ok`
    and what it found."""
    for number in numbers:
        begin = time.monotonic()
        broken = False
        try:
            row = check(number)
        except FAILED as error:
            row = {"ok": False, "error": why(error)}
            broken = isinstance(error, RuntimeError) and "CUDA" in str(error)
        print(
            json.dumps({"number": number, **row, "seconds": round(time.monotonic() - begin, 1)}),
            flush=True,
        )
        if broken:  # after a fault on the device nothing works in this process
            sys.exit(1)


def check_apart(
    command: Sequence[str], count: int, workers: int, share: float, session: Session
) -> list[Row]:
    """A row for each number below `count`, from children that are started as `command --check
    NUMBER ...`.

    workers: children at a time, at most; one without CUDA. share: of the session's time, that
    checks may take.
    """
    workers = min(workers, os.cpu_count() or 1, count) if session.cuda else 1
    parts = [list(range(first, count, workers)) for first in range(workers)]
    end = time.monotonic() + share * (session.end - time.monotonic())
    with ThreadPoolExecutor(workers) as pool:
        found = {
            number: row
            for part in pool.map(lambda numbers: _check_some(command, numbers, end), parts)
            for number, row in part.items()
        }
    return [found[number] for number in range(count)]


def _check_some(command: Sequence[str], numbers: list[int], end: float) -> dict[int, Row]:
    """Rows from one child after another: a new one after each that dies."""
    found: dict[int, Row] = {}
    left = list(numbers)
    while left:
        seconds = end - time.monotonic()
        if seconds <= 1:
            found |= {
                number: {"ok": False, "reason": "not checked: the time was over"} for number in left
            }
            break
        try:
            done = subprocess.run(
                [sys.executable, *command, "--check", *map(str, left)],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            output, how = (
                done.stdout,
                f"the process ended with {done.returncode}: {done.stderr[-300:]}",
            )
        except subprocess.TimeoutExpired as error:
            output = (
                error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            )
            how = "the process did not end in time"
        rows = [
            json.loads(line)
            for line in output.splitlines()
            if line.startswith('{"number"') and line.endswith("}")
        ]
        found |= {row.pop("number"): row for row in rows}
        left = [number for number in left if number not in found]
        if left and not rows:
            found[left.pop(0)] = {"ok": False, "error": how}
    return found
