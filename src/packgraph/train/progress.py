"""What a person sees of a run: a bar on a terminal, plain lines in a log, both on stderr."""

import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from packgraph.train.config_values import printable


def describe_row(row: Mapping[str, Any]) -> str:
    """The figures of one step in words; `row` as written to metrics.jsonl."""
    loss = "no number" if row["loss"] is None else f"{row['loss']:.4f}"
    padding = 1 - row["tokens"] / row["places"]
    return (
        f"loss {loss}  {row['tokens'] / row['seconds']:,.0f} tokens/s  padding {padding:.1%}  "
        f"replays {row['replayed']}  fallbacks {row['fallbacks']}"
    )


@dataclasses.dataclass
class ProgressView:
    """Shows the rows of a run. Use as a context manager; notes may be printed at any time."""

    total_steps: int
    log_every: int
    console: Console = dataclasses.field(
        default_factory=lambda: Console(stderr=True, highlight=False)
    )

    def __post_init__(self) -> None:
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

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(printable(text), soft_wrap=True, markup=False)

    def show(self, row: Mapping[str, Any]) -> None:
        """The figures of one finished step."""
        if self.console.is_terminal:
            self._bar.update(self._task, completed=row["step"], description=describe_row(row))
        elif row["step"] % self.log_every == 0 or row["step"] in (1, self.total_steps):
            self.note(f"step {row['step']}/{self.total_steps}  {describe_row(row)}")
