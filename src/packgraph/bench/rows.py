"""The results of a benchmark: one JSON line per row, and a table at the end.

A row says what was run (benchmark, way, shapes), the figures, the device, the versions and the
commit. The invariant: every way that was asked for has a row; one that could not be measured has
its `reason` in it instead of figures.
"""

import importlib.metadata
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import packgraph

# What running a model under a compiler or a capture may raise; running out of memory is a
# RuntimeError.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    ImportError,
    OSError,
)
TABLE_WIDTH = 170
KERNEL_PACKAGES = ("triton", "flash-attn-4")  # whose versions decide about times, too

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def figures(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th, 90th and 99th percentile (interpolated) and number of `values`; there must be
    at least one."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return round(low + (high - low) * (place - math.floor(place)), 4)

    return {"median": at(0.5), "p10": at(0.1), "p90": at(0.9), "p99": at(0.99), "n": len(ordered)}


def why(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def commit_of_source() -> str:
    """The commit of the folder this runs from, with `-dirty` for local changes; `unknown` outside a
    git checkout."""
    root = Path(__file__).resolve().parents[3]
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


def facts(device: torch.device, commit: str | None) -> Row:
    """Returns facts of the measurement for every row. commit: None looks into the git checkout."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu ({platform.machine()})"
    )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packgraph": packgraph.__version__,
    } | {name: _installed(name) for name in KERNEL_PACKAGES}
    return {"device": name, "versions": versions, "commit": commit or commit_of_source()}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Rows:
    """Writes rows as they come: to stdout, and to the end of `out` if given. write: False on all
    but one rank."""

    def __init__(self, shared: Row, out: Path | None = None, write: bool = True) -> None:
        self.shared, self.out, self.write = shared, out, write
        self.all: list[Row] = []

    def add(self, row: Row) -> None:
        """Write one row."""
        whole = row | self.shared
        self.all.append(whole)
        if not self.write:
            return
        line = json.dumps(whole)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def print_table(self, title: str, columns: Sequence[Column]) -> None:
        """All rows so far as a table on stderr (stdout holds JSON only), and under it why figures
        are missing."""
        if not self.write:
            return
        console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else TABLE_WIDTH)
        table = Table(title=title, title_justify="left")
        for name, _ in columns:
            table.add_column(
                name,
                justify="left" if name == "way" else "right",
                no_wrap=name == "way",
                overflow="fold",
            )
        for row in self.all:
            table.add_row(*(cell(row) for _, cell in columns))
        console.print(table)
        for row in self.all:
            why_not_more = row["reason"] or row.get("stopped")  # what ended a search
            if why_not_more is not None:
                console.print(
                    f"{row['way']} at {row['tokens']} tokens: {why_not_more}",
                    markup=False,
                    highlight=False,
                )

    @property
    def measured(self) -> bool:
        """True if anything could be measured."""
        return any(row["reason"] is None for row in self.all)


def median(name: str, digits: int = 2) -> Callable[[Row], str]:
    """Cell with the median of a figure."""
    return quantile(name, "median", digits)


def quantile(name: str, which: str, digits: int = 2) -> Callable[[Row], str]:
    """Cell with a quantile of a figure: median, p10, p90 or p99 (which rows of older versions
    lack)."""

    def cell(row: Row) -> str:
        found = row["figures"].get(name, {}).get(which)
        return "-" if found is None else f"{found:.{digits}f}"

    return cell


def value(name: str, form: str = "") -> Callable[[Row], str]:
    """Cell with a value of the row."""
    return lambda row: "-" if row.get(name) is None else format(row[name], form)


def gibibytes(name: str) -> Callable[[Row], str]:
    """Cell with bytes as GiB."""
    return lambda row: "-" if row.get(name) is None else f"{row[name] / 2**30:.2f}"
