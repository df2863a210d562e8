"""Progress of work for people: bars on a terminal, lines elsewhere, both on stderr.

`ProgressView` shows a run, and writes what it says into `run.log` in the run's folder, too:

    step 24/160 ━━━━━━━━━━ 0:00:12 ETA 0:01:23  loss 3.7167  2,174 tokens/s ...   the bar; figures
                                                                                  that have no room
                                                                                  are left out
    step 20/160  0:00:10  ETA 0:01:25  loss 3.8012  2,169 tokens/s ...            a line, in a log

`Phases` shows any other work that takes long, such as captures, saves or the tokenizing of a
source. Of a phase that takes less than `SECONDS` a log says nothing.

Documents that were cut or left out are said once when it first happens, and counted, so that none
is lost in silence. Counts are those of the stream since the start of the run; a document that comes
again in the next epoch counts again.
"""

import contextlib
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from packgraph.graphs.memory.budget import shown
from packgraph.train.config.reading import printable

RUN_LOG = "run.log"
SECONDS = 10.0  # between two lines of a phase
BAR, TIME = 10, len("  1 day, 23:59:59 ")  # columns of a bar, and of the time that has passed
TICK = 0.1  # seconds between two movements of a bar
MOST_HELD = 200  # lines that wait for run.log
Item = TypeVar("Item")
FIRST = {
    "split": "a document longer than every capacity was split into pieces",
    "dropped": "a document longer than every capacity was dropped (by data.overlong = drop, or "
    "since an answer is never cut from its prompt)",
    "empty": "an empty document was left out",
    "unlabelled": "a document without a token to predict was left out",
    "bad": "a bad document was left out (data.on_bad = skip)",
}


def in_time(seconds: float) -> str:
    """Returns seconds as H:MM:SS."""
    return str(timedelta(seconds=round(seconds)))


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.quiet


def progress_bars(console: Console, *, keeps: bool = False) -> Progress:
    """Bars between a name and the time that has passed and figures; nothing where `console` is no
    terminal. keeps: they stay there when they end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(BAR),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        console=console,
        transient=not keeps,
        redirect_stdout=sys.stdout.isatty(),
        disable=not _is_live(console),
    )


@dataclass(frozen=True)
class Phases:
    """Shows phases of work.

    Attributes:
        tell: Takes a line of text.
        now: A clock, in seconds.
        every: Seconds between two lines.
        bars: Where phases are shown instead, on a terminal.
    """

    tell: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    every: float = SECONDS
    bars: Progress | None = None

    def of(
        self, phase: str, total: int, items: Iterable[Item], unit: str = "step"
    ) -> Iterator[Item]:
        """Yields `items` as they are; one is done when the next is asked for.

        Args:
            phase: Its name, empty where there is nothing to tell it from.
            total: The number of items at most.
            items: Of the phase.
            unit: What an item is.
        """
        name = f"{phase}: " if phase else ""
        began = told = moved = self.now()
        done = 0
        with self._bar(phase, total) as move:
            for item in items:
                yield item
                done, now = done + 1, self.now()
                left = in_time((now - began) / done * (total - done))
                if now - moved >= TICK or done == total:
                    moved = now
                    move(done, f"{unit} {done:,} of {total:,} ({done / total:.0%})  ETA {left}  ")
                if self.bars is None and now - told >= self.every and done < total:
                    told = now
                    so_far = f"{done:,} of {total:,}, {in_time(now - began)}"
                    self.tell(f"{name}{unit} {so_far}, ETA {left}")
        if self.bars is None and (seconds := self.now() - began) >= self.every:
            self.tell(f"{name}{done:,} {unit}{'s' * (done != 1)} in {in_time(seconds)}")

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Shows what runs within the block, of which nobody knows how long it takes."""
        began = self.now()
        with self._bar(phase, None):
            yield
        if self.bars is None and (seconds := self.now() - began) >= self.every:
            self.tell(f"{phase}: {in_time(seconds)}")

    @contextlib.contextmanager
    def _bar(self, phase: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """Shows a bar below those that are there. Yields what moves it."""
        if (bars := self.bars) is None:
            yield lambda done, figures: None
            return
        # What is too long would narrow all columns.
        names = (len(task.description) for task in bars.tasks)
        room = max(1, bars.console.width - max(names, default=0) - BAR - TIME)
        task = bars.add_task("", total=total, figures=phase[:room])
        try:
            yield lambda done, figures: bars.update(
                task, completed=done, figures=(figures + phase)[:room]
            )
        finally:
            bars.remove_task(task)


SILENT = Phases(lambda text: None)


@contextlib.contextmanager
def phases_of_command(*, quiet: bool = False) -> Iterator[Phases]:
    """Yields what shows the phases of a command on stderr, until the block ends; nothing with
    `quiet`."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    with progress_bars(console) as bars:
        yield Phases(
            lambda text: console.print(printable(text), soft_wrap=True, markup=False),
            bars=bars if _is_live(console) else None,
        )


def describe_row(row: Mapping[str, Any]) -> list[str]:
    """The figures of one step in words, what matters most first; `row` as written to
    metrics.jsonl."""
    none = "of no label" if row.get("unlabelled") else "no number"
    seconds = max(row["seconds"], 1e-9)
    found = [
        f"loss {none if row['loss'] is None else format(row['loss'], '.4f')}",
        f"{row['tokens'] / seconds:,.0f} tokens/s",
    ]
    found += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    found += [f"peak {shown(row['peak_memory'])}"] if "peak_memory" in row else []
    found += [f"data wait {row['data_wait'] / seconds:.1%}"] if "data_wait" in row else []
    return [
        *found,
        f"padding {1 - row['tokens'] / row['places']:.1%}",
        f"replays {row['replayed']}",
        f"fallbacks {row['fallbacks']}",
    ]


class ProgressView(contextlib.AbstractContextManager["ProgressView"]):
    """Shows the rows of a run, and what is said of it. Use as a context manager.

    Attributes:
        phases: Shows what takes long beside steps.
    """

    def __init__(self, total_steps: int, log_every: int, console: Console | None = None) -> None:
        """console: stderr by default; a quiet one says nothing, and writes no run.log."""
        self.console = console or Console(stderr=True, highlight=False)
        self._total, self._log_every = total_steps, log_every
        self._told: set[str] = set()
        self._log: Path | None = None
        self._held = deque[str](maxlen=MOST_HELD)
        self._began = time.monotonic()
        self._bars = progress_bars(self.console, keeps=True)
        self._is_live = _is_live(self.console)
        self.phases = Phases(self.note, bars=self._bars if self._is_live else None)
        self._task = self._bars.add_task("starting", total=total_steps, figures="")
        self._warn = warnings.showwarning

    def __enter__(self) -> "ProgressView":
        self._bars.start()
        self._warn = warnings.showwarning
        warnings.showwarning = self._show_warning
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        warnings.showwarning = self._warn
        self._bars.stop()
        if kind is not None:
            self.log(f"{kind.__name__}: {error}")

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._warn(message, category, filename, lineno, file, line)
        self.log(f"{category.__name__}: {message}")

    def note(self, *texts: str) -> None:
        """Lines of their own, above the bar."""
        for text in texts:
            self.console.print(printable(text), soft_wrap=True, markup=False)
        self.log(*texts)

    def open_log(self, folder: Path) -> None:
        """Writes what was said so far, and what will be, into run.log in the folder of a run."""
        self._log = folder / RUN_LOG
        self._write(self._held)

    def log(self, *texts: str) -> None:
        """Lines for run.log alone."""
        if self.console.quiet:
            return
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        lines = [f"{now} {printable(text)}\n" for text in texts]
        if self._log is None:
            self._held.extend(lines)
        else:
            self._write(lines)

    def _write(self, lines: Iterable[str]) -> None:
        """Add to run.log; it is given up, and the run goes on, where that fails."""
        assert self._log is not None
        path = self._log
        try:
            with path.open("a", encoding="utf-8") as stream:
                stream.writelines(lines)
        except OSError as error:
            self._log = None
            self.note(f"{path} gets no more lines, the run goes on: {error.strerror or error}")

    def tell_left_out(self, counts: Mapping[str, Any]) -> None:
        """Say what has happened to documents for the first time. counts: of `feed.counts_of`."""
        for kind, text in FIRST.items():
            if counts[kind] and kind not in self._told:
                self._told.add(kind)
                which = f": {counts['first_bad'][0]}" if kind == "bad" else ""
                self.note(f"data: {text}{which}; summary.json counts them")

    def show(self, row: Mapping[str, Any]) -> None:
        """The figures of one finished step."""
        name = f"step {row['step']}/{self._total}"
        figures = describe_row(row)
        if "eta_seconds" in row:
            figures.insert(0, f"ETA {in_time(row['eta_seconds'])}")
        passed = in_time(time.monotonic() - self._began)
        if row["step"] % self._log_every == 0 or row["step"] in (1, self._total):
            tell = self.log if self._is_live else self.note
            tell("  ".join([name, passed, *figures]))
        if self._is_live:
            room = self.console.width - len(name) - BAR - len(f"   {passed} ")
            while len("  ".join(figures)) > room and len(figures) > 1:
                figures.pop()
            self._bars.update(
                self._task, completed=row["step"], description=name, figures="  ".join(figures)
            )


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
