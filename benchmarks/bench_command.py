"""The command of benchmarks: read the options, say at once all that is wrong with them, run, print
a table."""

import difflib
import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from bench_step import BenchArguments

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Column, Rows, facts
from packgraph.parallel.ranks import Launch
from packgraph.train.config.command_line import options_help, parse_arguments
from packgraph.train.config.reading import ConfigError, shown
from packgraph.train.launch import choose_device

FAILED = 1
COMMAND = "python benchmarks/bench.py"
INTRODUCTION = """\
usage: {command} NAME [--option VALUE ...]

Time the ways of running the same packed documents, side by side in one process.

    {command} step --model qwen3-0.6b --part layers --tokens 1024 4096
    {command} moe

One JSON line per row goes to stdout (and to the end of FILE with --out), a table to stderr. What
cannot be measured gets a row with the reason. `packgraph try` compares a model of yours.

benchmarks:
{names}

`{command} NAME --help` has the options of each."""


class Benchmark(NamedTuple):
    """One benchmark.

    options: its dataclass, whose docstring is its help. measure: writes its rows. columns: of its
    table.
    """

    options: type[BenchArguments]
    measure: Callable[[Any, torch.device, Rows, Deadline], None]
    columns: Sequence[Column]


def bench(
    words: Sequence[str], benchmarks: Mapping[str, Benchmark], commit: str | None = None
) -> int:
    """Run one benchmark.

    Args:
        words: Its name and options.
        benchmarks: Those that there are, by name.
        commit: Of the source, where it is known and `--commit` says no other.

    Returns:
        The exit code: 1 when nothing could be measured, or where the rows do not hold.

    Raises:
        ConfigError: Listing everything that is wrong with the options.
    """
    if not words or words[0] in ("-h", "--help"):
        names = "\n".join(
            f"  {name:12} {(one.options.__doc__ or '').splitlines()[0]}"
            for name, one in benchmarks.items()
        )
        print(INTRODUCTION.format(command=COMMAND, names=names))
        return 0
    asked = read_bench(words, benchmarks)
    found = benchmarks[words[0]]
    if asked.help:
        text = inspect.cleandoc(found.options.__doc__ or "")
        print(f"usage: {COMMAND} {words[0]} [--option VALUE ...]\n\n{text}")
        print(options_help(found.options()))
        return 0
    launch = Launch.read()
    device = choose_device(vars(asked).get("device", "cpu"), launch)
    asked = asked.on(device.type, launch)
    rows = Rows(facts(device, asked.commit or commit), asked.out, write=launch.rank == 0)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        found.measure(asked, device, rows, Deadline(asked.seconds))
    finally:  # of what there is, even after an error, an interruption or the end of a time limit
        signal.signal(signal.SIGTERM, before)
        ranks = f" on {launch.world} ranks" if launch.world > 1 else ""
        rows.print_table(f"bench {words[0]}{ranks}", found.columns)
    held = not rows.write or asked.holds(rows.all)
    return 0 if rows.measured and held else FAILED


def read_bench(words: Sequence[str], benchmarks: Mapping[str, Benchmark]) -> Any:
    """The options of the benchmark that `words` begin with. Raises ConfigError."""
    name, *rest = words
    if name not in benchmarks:
        near = difflib.get_close_matches(name, benchmarks, n=1)
        meant = f", did you mean {near[0]}?" if near else "."
        raise ConfigError([f"no benchmark {shown(name)}{meant} Known: {', '.join(benchmarks)}"])
    return parse_arguments(rest, benchmarks[name].options()).own


def _stop(number: int, frame: object) -> None:
    """`timeout` and job schedulers ask to end by SIGTERM: rows that are measured shall not be
    lost."""
    raise KeyboardInterrupt
