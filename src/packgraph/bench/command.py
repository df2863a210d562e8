"""`packgraph bench NAME`: read the options, say at once all that is wrong with them, run, print a
table."""

import dataclasses
import difflib
import importlib.util
import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from packgraph.bench.attention import COLUMNS as ATTENTION_COLUMNS
from packgraph.bench.attention import AttentionOptions, bench_attention, usual_backends
from packgraph.bench.banks import (
    CAPTURE_COLUMNS,
    MEMORY_COLUMNS,
    CaptureOptions,
    MemoryOptions,
    bench_capture,
    bench_memory,
)
from packgraph.bench.context import COLUMNS as CONTEXT_COLUMNS
from packgraph.bench.context import ContextBenchOptions, bench_context
from packgraph.bench.integrations import COLUMNS as INTEGRATION_COLUMNS
from packgraph.bench.integrations import IntegrationOptions, ModelError, bench_integrations
from packgraph.bench.models import shape
from packgraph.bench.moe_variants import with_memory
from packgraph.bench.offload import COLUMNS as OFFLOAD_COLUMNS
from packgraph.bench.offload import OffloadOptions, bench_offload
from packgraph.bench.offload_measures import free_host_bytes
from packgraph.bench.options import (
    KILO,
    AttentionArguments,
    BenchArguments,
    CaptureArguments,
    ContextArguments,
    IntegrationArguments,
    MemoryArguments,
    MoeArguments,
    OffloadArguments,
    PaddingArguments,
    PipelineArguments,
    StepArguments,
    WorkArguments,
)
from packgraph.bench.padding import COLUMNS as PADDING_COLUMNS
from packgraph.bench.padding import PaddingOptions, bench_padding
from packgraph.bench.pipeline import COLUMNS as PIPELINE_COLUMNS
from packgraph.bench.pipeline import PipelineOptions, bench_pipeline
from packgraph.bench.rows import Rows, facts
from packgraph.bench.step import COLUMNS as STEP_COLUMNS
from packgraph.bench.step import StepOptions, bench_step
from packgraph.bench.timing import Deadline
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pipeline.schedule import legal_microbatches
from packgraph.parallel.processes import Launch
from packgraph.train.command_line import options_help, parse_arguments
from packgraph.train.config import ConfigError
from packgraph.train.config_values import shown
from packgraph.train.launch import choose_device

T = TypeVar("T")
FAILED = 1

INTRODUCTION = """\
usage: packgraph bench NAME [--option VALUE ...]

Time the ways of running the same packed documents, side by side in one process.

    packgraph bench step --model qwen3-0.6b --part layers --tokens 1024 4096
    packgraph bench moe
    torchrun --nproc-per-node 4 -m packgraph.cli bench pipeline --model qwen3-8b --chunks 2
    packgraph bench padding

One JSON line per row goes to stdout (and to the end of FILE with --out), a table to stderr. What
cannot be measured gets a row with the reason.

benchmarks:
{names}

`packgraph bench NAME --help` has the options of each."""


class Benchmark(NamedTuple):
    """One benchmark.

    options: its dataclass, whose docstring is its help. run: measures; returns the exit code.
    """

    options: type[BenchArguments]
    run: Callable[[Any], int]


def bench(words: Sequence[str]) -> int:
    """Run one benchmark.

    Args:
        words: Its name and options.

    Returns:
        The exit code: 1 when nothing could be measured.

    Raises:
        ConfigError: Listing everything that is wrong with the options.
    """
    if not words or words[0] in ("-h", "--help"):
        names = "\n".join(
            f"  {name:12} {(one.options.__doc__ or '').splitlines()[0]}"
            for name, one in BENCHMARKS.items()
        )
        print(INTRODUCTION.format(names=names))
        return 0
    asked = read_bench(words)
    found = BENCHMARKS[words[0]]
    if asked.help:
        text = inspect.cleandoc(found.options.__doc__ or "")
        print(f"usage: packgraph bench {words[0]} [--option VALUE ...]\n\n{text}")
        print(options_help(found.options()))
        return 0
    return found.run(asked)


def read_bench(words: Sequence[str]) -> Any:
    """The options of the benchmark that `words` begin with. Raises ConfigError."""
    name, *rest = words
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        meant = f", did you mean {near[0]}?" if near else "."
        raise ConfigError([f"no benchmark {shown(name)}{meant} Known: {', '.join(BENCHMARKS)}"])
    return parse_arguments(rest, BENCHMARKS[name].options()).own


def _options(kind: Callable[..., T], asked: BenchArguments, **more: object) -> T:
    """Options of a benchmark, from those of the command that are called the same."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(asked).items() if name in names} | more)


def _step(asked: StepArguments) -> int:
    is_moe = isinstance(asked, MoeArguments)
    return _measure(
        f"bench {'moe' if is_moe else 'step'}",
        asked,
        StepOptions,
        bench_step,
        with_memory(STEP_COLUMNS) if is_moe else STEP_COLUMNS,
    )


def _attention(asked: AttentionArguments) -> int:
    def backends(asked: WorkArguments, device: torch.device) -> dict[str, object]:
        given = vars(asked)["ways"]
        return {"ways": given or usual_backends(shape(str(asked.model)), device)}

    return _measure(
        "bench attention", asked, AttentionOptions, bench_attention, ATTENTION_COLUMNS, backends
    )


def _integrations(asked: IntegrationArguments) -> int:
    if not importlib.util.find_spec("transformers"):
        _refuse(["bench integrations needs transformers: pip install packgraph[transformers]"])
    try:
        return _measure(
            "bench integrations",
            asked,
            IntegrationOptions,
            bench_integrations,
            INTEGRATION_COLUMNS,
        )
    except ModelError as error:
        raise ConfigError([str(error)]) from error


def _memory(asked: MemoryArguments) -> int:
    return _measure("bench memory", asked, MemoryOptions, bench_memory, MEMORY_COLUMNS)


def _capture(asked: CaptureArguments) -> int:
    return _measure("bench capture", asked, CaptureOptions, bench_capture, CAPTURE_COLUMNS)


def _offload(asked: OffloadArguments) -> int:
    # Half: torch may round what it pins up to a power of two.
    host_bytes = free_host_bytes() // 2 if asked.host_gib is None else int(asked.host_gib * 2**30)
    return _measure(
        "bench offload",
        asked,
        OffloadOptions,
        bench_offload,
        OFFLOAD_COLUMNS,
        lambda asked, device: {"host_bytes": host_bytes},
    )


def _measure(
    title: str,
    asked: WorkArguments,
    kind: Callable[..., T],
    measure: Callable[[T, torch.device, Rows, Deadline], None],
    columns: Sequence[tuple[str, Callable]],
    more: Callable[[WorkArguments, torch.device], Mapping[str, object]] = lambda *_: {},
) -> int:
    """Run a benchmark of one process. more: options that its command has not."""
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    asked = asked.on(device.type)
    options = _options(kind, asked, **more(asked, device))
    return _finish(
        rows,
        lambda: measure(options, device, rows, Deadline(asked.seconds)),
        title,
        columns,
    )


def _padding(asked: PaddingArguments) -> int:
    rows = Rows(facts(torch.device("cpu"), asked.commit), asked.out)
    options = _options(PaddingOptions, asked)
    return _finish(
        rows,
        lambda: bench_padding(options, rows, Deadline(asked.seconds)),
        "bench padding",
        PADDING_COLUMNS,
    )


def _pipeline(asked: PipelineArguments) -> int:
    launch = Launch.read()
    ranks = asked.pp or launch.world
    problems = Layout(dp=1, pp=ranks).problems(launch.world)
    _refuse(problems + legal_microbatches(ranks, asked.chunks, None, asked.microbatches))
    device = choose_device(asked.device)
    if device.type == "cuda" and launch.local_rank >= torch.cuda.device_count():
        _refuse(
            [
                f"process {launch.local_rank} of this host has no GPU: there are "
                f"{torch.cuda.device_count()}; start "
                "fewer processes (torchrun --nproc-per-node), or use --device cpu"
            ]
        )
    device = torch.device("cuda", launch.local_rank) if device.type == "cuda" else device
    options = _options(PipelineOptions, asked.on(device.type), ranks=ranks)
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(
        rows,
        lambda: bench_pipeline(options, device, launch, rows, Deadline(asked.seconds)),
        f"bench pipeline on {ranks} ranks",
        PIPELINE_COLUMNS,
    )


def _context(asked: ContextArguments) -> int:
    launch = Launch.read()
    device = choose_device(asked.device, launch)
    asked = asked.on(device.type)
    fixed = asked.fixed or min(4, launch.world)
    longest = asked.longest or min(8 * KILO, fixed * min(asked.tokens))
    options = _options(ContextBenchOptions, asked, ranks=launch.world, fixed=fixed, longest=longest)
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(
        rows,
        lambda: bench_context(options, device, launch, rows, Deadline(asked.seconds)),
        f"bench context on {launch.world} ranks",
        CONTEXT_COLUMNS,
    )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _finish(
    rows: Rows, run: Callable[[], None], title: str, columns: Sequence[tuple[str, Callable]]
) -> int:
    """Run; print the table of what there is, even after an error, an interruption or the end of a
    time limit."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        run()
    finally:
        signal.signal(signal.SIGTERM, before)
        rows.print_table(title, columns)
    return 0 if rows.measured else FAILED


def _stop(number: int, frame: object) -> None:
    """`timeout` and job schedulers ask to end by SIGTERM: rows that are measured shall not be
    lost."""
    raise KeyboardInterrupt


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "step": Benchmark(StepArguments, _step),
        "moe": Benchmark(MoeArguments, _step),
        "integrations": Benchmark(IntegrationArguments, _integrations),
        "pipeline": Benchmark(PipelineArguments, _pipeline),
        "context": Benchmark(ContextArguments, _context),
        "attention": Benchmark(AttentionArguments, _attention),
        "padding": Benchmark(PaddingArguments, _padding),
        "memory": Benchmark(MemoryArguments, _memory),
        "capture": Benchmark(CaptureArguments, _capture),
        "offload": Benchmark(OffloadArguments, _offload),
    }
)
