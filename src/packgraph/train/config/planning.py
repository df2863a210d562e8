"""Usage texts and options of `packgraph plan`: of a schedule, of data, of memory."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.parallel.context.request import PLACES
from packgraph.train.config.presets import PRESETS
from packgraph.train.config.reading import (
    CommandArguments,
    ConfigError,
    ConfigLayer,
    Count,
    option,
    path_problem,
    shown,
)
from packgraph.train.config.sections import SOURCES

PLAN_USAGE = """\
usage: packgraph plan --ranks N --microbatches N [--chunks N] [--group N] [--svg FILE] ...
       packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]
       packgraph plan memory [PRESET] [--tokens N] [--memory SIZE] [--world N] [--json]

Draw a pipeline schedule: who runs what when, in which slot and bucket; and say what it costs: slots
per rank and chunk, steady memory, bubble. Nothing is run, no GPU and no data are needed.

    packgraph plan --ranks 4 --chunks 2 --microbatches 8 --svg plan.svg
    packgraph plan --ranks 2 --microbatches 4 --capacities 1024,2048 --buckets 0,1,0,0

`packgraph plan DATA` chooses buckets for the lengths of documents instead, and with --world N
shares out one step's documents to ranks (dynamic context parallelism); see
`packgraph plan stdlib --help`. `packgraph plan memory` shows time against memory of recomputation
and offloading; with --world N, which ways to spread a run over N GPUs fit and are fastest."""

PLAN_DATA_USAGE = f"""\
usage: packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]

Choose the capacities graphs are captured for from the lengths of the documents, as
`--graph.capacities auto` does in `packgraph train`, and say what they cost: padding, memory, time
for capture. Nothing is run, no GPU is needed. The preset is {next(iter(PRESETS))} where none is
named.

    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --buckets.max-tokens 16384
    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --world 8

Further options are those of `packgraph train --help all`; those that count are data.*, buckets.*,
graph.slots, model.* and parallel.*."""


PLAN_MEMORY_USAGE = """\
usage: packgraph plan memory [PRESET] [--tokens N] [--memory SIZE] [--json] [--section.option VALUE ...]
       packgraph plan memory [PRESET] --world N [--tokens N] [--step-tokens N] [--memory SIZE] [...]

Show time against memory of one row: activations kept, recomputed, on the host, and both. With
--world, show the ways to spread the run over N GPUs that fit, the fastest first. Estimates from the
shape of the model; nothing is run, no GPU is needed.

    packgraph plan memory qwen3-0.6b --tokens 65536 --memory 139GiB
    packgraph plan memory moonlight --world 1024 --tokens 8192 --memory 139GiB
"""  # noqa: E501
WITH_WORLD = frozenset(("tokens_per_rank", "sizes", "places", "microbatches", "costs", "svg"))
MEMORY_WITH_WORLD = ("step_tokens", "per_host", "link_gb_s", "net_gb_s", "top")


@dataclass(frozen=True, kw_only=True)
class ScheduleArguments(CommandArguments):
    """Options of `packgraph plan` without data."""

    ranks: int = option(0, "pipeline ranks", metavar="N", required=True)
    microbatches: int = option(0, "microbatches of the step drawn", metavar="N", required=True)
    chunks: int = option(
        1, "chunks of the model per rank: 1F1B if 1, interleaved if more", metavar="N"
    )
    group: int | None = option(
        None,
        "microbatches that a chunk runs before the next chunk's turn (default: ranks)",
        metavar="N",
    )
    capacities: tuple[int, ...] = option(
        (), "tokens of each bucket; times are then drawn in proportion", metavar="T,T,..."
    )
    buckets: tuple[int, ...] = option(
        (),
        "bucket of each microbatch, as index of --capacities (default: the largest for all)",
        metavar="I,I,...",
    )
    svg: Path | None = option(None, "also draw to this file, whole and in colours", metavar="FILE")
    csv: Path | None = option(
        None,
        "also write the actions, in the words of torch.distributed.pipelining",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class PlanArguments(CommandArguments):
    """Own options of `packgraph plan DATA`."""

    data: str | None = option(
        None,
        "a .jsonl or .parquet file, a folder of text files, or stdlib; a preset or --config FILE "
        "name their own",
        positional=True,
    )
    preset: str | None = option(
        None,
        "the run whose model and options are meant (see `packgraph presets`)",
        positional=True,
    )
    config: Path | None = option(None, "values from a .toml, .yaml or .json file", metavar="FILE")
    batch: Count | None = option(
        None,
        "so many documents are packed at a time and none waits for the next ones, as with "
        "`packgraph.pack`; without it they are packed as the trainer does, while data.window wait",
        metavar="N",
    )
    json: bool = option(False, "print JSON instead of a table")
    world: int | None = option(
        None,
        "share out one step's documents to N ranks (data x context parallel) instead, in groups of "
        "the size that each needs; the following options go with it",
        metavar="N",
    )
    tokens_per_rank: int = option(
        2048, "tokens that a rank has places for in a microbatch", metavar="N"
    )
    sizes: tuple[int, ...] = option(
        (),
        "sizes of groups, divisors of N (default: the powers of two that divide N)",
        metavar="C,C,...",
    )
    places: tuple[int, ...] = option(
        PLACES,
        "places for documents that a row may have, each a variant of the graphs",
        metavar="N,N,...",
    )
    microbatches: int = option(8, "of the step; documents that come later wait", metavar="N")
    costs: Path | None = option(
        None,
        "costs of rows as this run has measured them (--parallel.time-rows), its folder or its "
        "summary.json; without it they are estimates",
        metavar="RUN",
    )
    svg: Path | None = option(None, "also draw to this file, with all documents", metavar="FILE")

    def problems(self, given: Collection[str]) -> list[str]:
        """Lists what is wrong with these options together, of which `given` were given."""
        alone = [f"--{name.replace('_', '-')}" for name in sorted(WITH_WORLD.intersection(given))]
        if self.world is None:
            return [f"{name}: goes with --world N" for name in alone]
        if self.batch is not None:
            return ["--batch: chooses buckets, and --world shares out documents; give one of them"]
        return []


@dataclass(frozen=True, kw_only=True)
class PlanMemoryArguments(CommandArguments):
    """Own options of `packgraph plan memory`."""

    preset: str | None = option(
        None, "the run whose model is meant (see `packgraph presets`)", positional=True
    )
    config: Path | None = option(None, "values from a .toml, .yaml or .json file", metavar="FILE")
    tokens: Count = option(65536, "of the row", metavar="N")
    length: int | None = option(None, "of its documents in tokens; default: one", metavar="N")
    memory: str | None = option(None, "of the device, as 139GiB", metavar="SIZE")
    tflops: float = option(500.0, "that products make of the device", metavar="N")
    gb_s: float = option(50.0, "gigabytes a second of copies to the host", metavar="N")
    device_gb_s: float = option(4000.0, "gigabytes a second of the device's memory", metavar="N")
    json: bool = option(False, "print JSON instead of a table")
    world: int | None = option(
        None, "show ways to spread the run over N GPUs; the following go with it", metavar="N"
    )
    step_tokens: int | None = option(
        None, "of a step over all GPUs; default: a row for each", metavar="N"
    )
    per_host: int = option(8, "GPUs of a host", metavar="N")
    link_gb_s: float = option(
        300.0, "gigabytes a second that a GPU sends to those of its host", metavar="N"
    )
    net_gb_s: float = option(40.0, "gigabytes a second that a GPU sends to others", metavar="N")
    top: int = option(10, "show so many ways", metavar="N")

    def problems(self, given: Collection[str] = ()) -> list[str]:
        """Lists what is wrong with these options, of which `given` were given."""
        numbers = ("length", "tflops", "gb_s", "device_gb_s", "world", *MEMORY_WITH_WORLD)
        found = [
            f"--{name.replace('_', '-')}: must be more than 0"
            for name in numbers
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.world is None:
            found += [
                f"--{name.replace('_', '-')}: goes with --world N"
                for name in MEMORY_WITH_WORLD
                if name in given
            ]
        try:
            self.limit()
        except ValueError as error:
            found.append(f"--memory: {error}")
        return found

    def limit(self) -> int | None:
        """Bytes of the device. Raises ValueError."""
        return None if self.memory is None else budget_bytes(self.memory, None)

    def link(self, span: int) -> float:
        """Bytes a second between ranks that lie within `span` consecutive ones."""
        return 1e9 * (self.link_gb_s if span <= self.per_host else self.net_gb_s)


def is_data_plan(words: Sequence[str]) -> bool:
    """Tells whether `packgraph plan` is asked about data, not about a schedule, which has no words
    but options."""
    return bool(words) and (
        not words[0].startswith("-")
        or any(
            word.partition("=")[0] in ("--config", "--world")
            or word.startswith(("--data.", "--buckets."))
            for word in words
        )
    )


def data_layers(data: str | None) -> list[ConfigLayer]:
    """DATA as values of a configuration. Raises ConfigError for unknown data."""
    if data is None:
        return []
    if data == "stdlib":
        return [ConfigLayer("DATA", {"data": {"source": "stdlib"}})]
    if (problem := path_problem(data)) is not None:
        raise ConfigError([f"{shown(data)} cannot be the path of data: {problem}"])
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError([f"{data}: no such file or folder, and no preset ({', '.join(PRESETS)})"])
    source = SOURCES.get(path.suffix.lower(), "text")
    return [ConfigLayer("DATA", {"data": {"source": source, "path": data}})]
