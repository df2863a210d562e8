"""Progress of a run for people: a bar on a terminal, plain lines in a log, both on stderr.

Documents that were cut or left out are said once when it first happens, and counted, so that none
is lost in silence.

Counts are those of the stream since the start of the run; a document that comes again in the next
epoch counts again.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from packgraph.train.config.reading import printable

FIRST = {
    "split": "a document longer than every capacity was split into pieces",
    "dropped": "a document longer than every capacity was dropped (by data.overlong = drop, or "
    "since an answer is never cut from its prompt)",
    "empty": "an empty document was left out",
    "unlabelled": "a document without a token to predict was left out",
    "bad": "a bad document was left out (data.on_bad = skip)",
}


def describe_row(row: Mapping[str, Any]) -> str:
    """The figures of one step in words; `row` as written to metrics.jsonl."""
    none = "of no label" if row.get("unlabelled") else "no number"
    loss = none if row["loss"] is None else f"{row['loss']:.4f}"
    padding = 1 - row["tokens"] / row["places"]
    return (
        f"loss {loss}  {row['tokens'] / row['seconds']:,.0f} tokens/s  padding {padding:.1%}  "
        f"replays {row['replayed']}  fallbacks {row['fallbacks']}"
    )


@dataclasses.dataclass
class ProgressView(contextlib.AbstractContextManager["ProgressView"]):
    """Shows the rows of a run. Use as a context manager; notes may be printed at any time."""

    total_steps: int
    log_every: int
    console: Console = dataclasses.field(
        default_factory=lambda: Console(stderr=True, highlight=False)
    )

    def __post_init__(self) -> None:
        self._told: set[str] = set()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=self.total_steps)

    def __enter__(self) -> "ProgressView":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def note(self, *texts: str) -> None:
        """Lines of their own, above the bar."""
        for text in texts:
            self.console.print(printable(text), soft_wrap=True, markup=False)

    def tell_left_out(self, counts: Mapping[str, Any]) -> None:
        """Say what has happened to documents for the first time. counts: of `feed.counts_of`."""
        for kind, text in FIRST.items():
            if counts[kind] and kind not in self._told:
                self._told.add(kind)
                which = f": {counts['first_bad'][0]}" if kind == "bad" else ""
                self.note(f"data: {text}{which}; summary.json counts them")

    def show(self, row: Mapping[str, Any]) -> None:
        """The figures of one finished step."""
        if self.console.is_terminal:
            self._bar.update(self._task, completed=row["step"], description=describe_row(row))
        elif row["step"] % self.log_every == 0 or row["step"] in (1, self.total_steps):
            self.note(f"step {row['step']}/{self.total_steps}  {describe_row(row)}")


def left_out_line(documents: Mapping[str, Any]) -> str:
    """One line on the counts of a summary; empty when every document was packed whole."""
    words = {
        "split": "split",
        "dropped": f"dropped ({documents.get('dropped_tokens', 0):,} tokens)",
        "empty": "empty",
        "unlabelled": "without a token to predict",
        "bad": f"bad (the first: {'; '.join(documents.get('first_bad', ()))})",
    }
    found = [f"{documents[kind]:,} {text}" for kind, text in words.items() if documents.get(kind)]
    return f"documents: {documents.get('packed', 0):,} packed, {', '.join(found)}" if found else ""
