"""Comparison of the rows of a benchmark with stored ones: step time and peak memory
(`python benchmarks/bench.py NAME --golden FILE`).

    row measured now ── same benchmark, way, shapes, documents ──▶ newest stored row
                     ── and the same device                        time and peak at most 5 % more

Times of two devices say nothing about each other, so rows of another device are never compared;
what is left uncompared is told with the reason. The invariant: a check that has compared nothing
fails, as does a row that could be measured once and cannot be measured any more.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from bench_command import Benchmark
from bench_step import BenchArguments

from packgraph.bench.rows import Row
from packgraph.train.config.reading import option

ALLOWED = 0.05  # more time or memory than the stored row
# What a row says of what was asked for; all of it must be equal for figures to be comparable.
SETUP = (
    *("benchmark", "way", "part", "model", "family", "layers", "dtype", "tokens", "documents"),
    *("buckets", "attention", "attention_asked", "kernel", "kind", "calls", "mean", "sigma"),
    *("longest", "seed", "ranks", "chunks", "microbatches", "slots", "room", "granularity"),
    *("sizes", "places", "compile", "modules", "lora"),
)
# The figure that is compared is the first one that both rows have.
TIMES = ("step_ms", "device_ms", "ms", "ms_per_1000_tokens")


class Golden:
    """Stored rows to compare with."""

    def __init__(self, path: Path) -> None:
        """Read the rows of a file, one JSON object a line.

        Raises:
            ValueError: The file cannot be read or holds no such rows.
        """
        self.path, self._rows = path, list[Row]()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--golden {path}: it cannot be read ({error})") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._rows.append(_read(line, f"--golden {path}: line {number}"))
        if not self._rows:
            raise ValueError(f"--golden {path}: it holds no rows")

    def compare(self, rows: Sequence[Row]) -> tuple[list[str], bool]:
        """Compare rows that were measured now.

        Args:
            rows: As `Rows.all` holds them.

        Returns:
            A line for each row, and whether nothing is worse than allowed and something was
            compared.
        """
        lines, compared, worse = list[str](), 0, 0
        for row in rows:
            stored, why_not = self._stored(row)
            name = f"{row['way']} at {row.get('tokens')} tokens"
            if stored is None:
                lines.append(f"{name}: not compared, {why_not}")
                continue
            figures, text = _differences(row, stored)
            lines.append(f"{name}: {text}{_origin(stored)}")
            compared += bool(figures)
            worse += any(more > ALLOWED for more in figures)
        if worse:
            lines.append(
                f"{worse} of {compared} compared rows are worse by more than {ALLOWED:.0%}"
            )
        elif not compared:
            lines.append(f"nothing could be compared with {self.path}, so nothing is known to hold")
        return lines, compared > 0 and not worse

    def _stored(self, row: Row) -> tuple[Row | None, str]:
        """The newest stored row of the same device, or why there is none."""
        alike = [one for one in self._rows if all(one.get(k) == row.get(k) for k in SETUP)]
        measured = [one for one in alike if one.get("reason") is None]
        mine = [one for one in measured if one.get("device") == row["device"]]
        if mine:
            return mine[-1], ""
        others = ", ".join(sorted({str(one.get("device")) for one in measured}))
        if others:
            return None, (
                f"{self.path} has it of {others} alone, and figures of other devices than this "
                f"({row['device']}) are never compared"
            )
        return None, f"{self.path} has no row of this shape that could be measured"


def _read(line: str, place: str) -> Row:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("figures", {}), dict):
        raise ValueError(f"{place} is no row of a benchmark")
    return row


def _differences(row: Row, stored: Row) -> tuple[list[float], str]:
    """How much more time and memory, as shares of the stored figures, and the same for people."""
    if row["reason"] is not None:
        return [float("inf")], f"could be measured once, and now: {row['reason']}"
    found, texts = list[float](), list[str]()
    for name, now, before in ((*_times(row, stored),), (*_peaks(row, stored),)):
        if now is not None and before:
            found.append(now / before - 1)
            texts.append(f"{name} {now:.4g} against {before:.4g} ({found[-1]:+.1%})")
    return found, ", ".join(texts) or "the rows have no figure in common"


def _times(row: Row, stored: Row) -> tuple[str, float | None, float | None]:
    for name in TIMES:
        pair = [one.get("figures", {}).get(name, {}).get("median") for one in (row, stored)]
        if None not in pair:
            return name, pair[0], pair[1]
    return TIMES[0], None, None


def _peaks(row: Row, stored: Row) -> tuple[str, float | None, float | None]:
    """Peak memory in GiB, of the rank that holds most."""
    now, before = (_most(one.get("peak_bytes")) for one in (row, stored))
    return "peak GiB", now, before


def _most(found: Any) -> float | None:
    parts = found if isinstance(found, list) else [found]
    known = [part / 2**30 for part in parts if part is not None]
    return max(known, default=None)


def _origin(stored: Row) -> str:
    torch = (stored.get("versions") or {}).get("torch", "unknown")
    return f"; stored at {stored.get('commit', 'unknown')} with torch {torch}"


@dataclass(frozen=True, kw_only=True)
class GoldenArguments(BenchArguments):
    """The option of every benchmark of a checkout."""

    golden: Path | None = option(
        None,
        "compare step time and peak memory with the rows of this file that the same device has "
        "measured; exit with 1 where one is more than 5 % worse, or none can be compared",
        metavar="FILE",
    )

    def problems(self) -> list[str]:
        """What is wrong with further options."""
        found = super().problems()
        if self.golden is not None:
            try:
                Golden(self.golden)
            except ValueError as error:
                found.append(str(error))
        return found

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the rows are as good as the stored ones; prints how they differ to stderr."""
        if self.golden is None:
            return True
        lines, held = Golden(self.golden).compare(rows)
        print("\n".join(lines), file=sys.stderr)
        return held


def with_golden(benchmark: Benchmark) -> Benchmark:
    """The benchmark with the option `--golden`."""
    options = make_dataclass(
        benchmark.options.__name__,
        (),
        bases=(GoldenArguments, benchmark.options),
        namespace={"__doc__": benchmark.options.__doc__},
        frozen=True,
        kw_only=True,
    )
    return benchmark._replace(options=options)
