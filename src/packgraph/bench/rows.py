"""The results of a benchmark: one JSON line per row, and a table at the end.

A row says what was run (benchmark, way, shapes), the figures, the device, the versions and the
commit. The invariant: every way that was asked for has a row; one that could not be measured has
its `reason` in it instead of figures.
"""

import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import packgraph
from packgraph.viz.drawing import aligned

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
KERNEL_PACKAGES = ("triton", "flash-attn-4")  # whose versions decide about times, too

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def figures(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th, 90th and 99th percentile (interpolated) and number of `values`; there must be
    at least one."""
    found = np.percentile(values, (50, 10, 90, 99)).round(4).tolist()
    return dict(zip(("median", "p10", "p90", "p99"), found, strict=True)) | {"n": len(values)}


def why(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def facts(device: torch.device, commit: str | None) -> Row:
    """Returns facts of the measurement for every row."""
    name = f"cpu ({platform.machine()})"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packgraph": packgraph.__version__,
        **{name: found.get(name) for name in KERNEL_PACKAGES},
    }
    return {"device": name, "versions": versions, "commit": commit or "unknown"}


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
        table = [[name for name, _ in columns]]
        table += [[cell(row) for _, cell in columns] for row in self.all]
        lines = [title, *aligned(table)]
        for row in self.all:
            why_not_more = row["reason"] or row.get("stopped")  # what ended a search
            if why_not_more is not None:
                lines.append(f"{row['way']} at {row['tokens']} tokens: {why_not_more}")
        print("\n".join(lines), file=sys.stderr)

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
