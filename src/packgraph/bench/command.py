"""`packgraph bench NAME`: read the options, say at once all that is wrong with them, run, print a
table."""

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from packgraph.bench.attention import COLUMNS as ATTENTION_COLUMNS
from packgraph.bench.attention import AttentionOptions, bench_attention, usual_backends
from packgraph.bench.banks import (
    CAPTURE_COLUMNS,
    CAPTURE_WAYS,
    MEMORY_COLUMNS,
    CaptureOptions,
    MemoryOptions,
    bench_capture,
    bench_memory,
)
from packgraph.bench.context import COLUMNS as CONTEXT_COLUMNS
from packgraph.bench.context import ContextBenchOptions, bench_context
from packgraph.bench.models import shape
from packgraph.bench.moe_variants import MOE_WAYS, with_memory
from packgraph.bench.offload import COLUMNS as OFFLOAD_COLUMNS
from packgraph.bench.offload import OffloadOptions, bench_offload
from packgraph.bench.offload_measures import free_host_bytes
from packgraph.bench.options import (
    KILO,
    attention_options,
    bank_options,
    context_options,
    offload_options,
    padding_options,
    pipeline_options,
    step_options,
)
from packgraph.bench.padding import COLUMNS as PADDING_COLUMNS
from packgraph.bench.padding import PaddingOptions, bench_padding
from packgraph.bench.pipeline import COLUMNS as PIPELINE_COLUMNS
from packgraph.bench.pipeline import PipelineOptions, bench_pipeline
from packgraph.bench.rows import Rows, facts
from packgraph.bench.step import COLUMNS as STEP_COLUMNS
from packgraph.bench.step import StepOptions, bench_step
from packgraph.bench.timing import Deadline
from packgraph.bench.variants import STEP_WAYS
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pipeline.schedule import legal_microbatches
from packgraph.parallel.processes import Launch
from packgraph.train.config import ConfigError
from packgraph.train.config_values import path_problem, shown
from packgraph.train.launch import choose_device

FAILED = 1

INTRODUCTION = """Time the ways of running the same packed documents, side by side in one process.

    packgraph bench step --model qwen3-0.6b --part layers --tokens 1024 4096
    packgraph bench moe
    torchrun --nproc-per-node 4 -m packgraph.cli bench pipeline --model qwen3-8b --layers 16 --chunks 2
    packgraph bench padding

One JSON line per row goes to stdout (and to the end of FILE with --out), a table to stderr. What cannot be measured
gets a row with the reason."""  # noqa: E501


def bench(words: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code: 1 when nothing could be measured. Raises
    ConfigError."""
    parser = _parser()
    try:
        asked = parser.parse_args(list(words) or ["--help"])
    except SystemExit as end:
        return int(end.code or 0)
    return asked.run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="packgraph bench",
        description=INTRODUCTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)

    def add(
        name: str, text: str, run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        found = benchmarks.add_parser(name, help=text, description=text, allow_abbrev=False)
        found.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
        found.add_argument(
            "--seconds", type=float, metavar="S", help="begin nothing further after this time"
        )
        found.add_argument(
            "--out", type=Path, metavar="FILE", help="append the rows to this file, too"
        )
        found.add_argument(
            "--commit", help="what rows say about the commit, where there is no git checkout"
        )
        found.set_defaults(run=run)
        return found

    step_options(
        add("step", "forward and backward of one microbatch", _step),
        STEP_WAYS,
        [KILO, 2 * KILO, 4 * KILO],
    )
    moe = add(
        "moe",
        "as step, with the defaults and ways of layers with experts (host-splits, partial, stash)",
        _step,
    )
    step_options(
        moe, MOE_WAYS, [KILO, 4 * KILO, 16 * KILO], ("moonlight", "moonlight-tiny"), "layers"
    )
    moe.add_argument(
        "--room",
        type=float,
        default=1.0,
        metavar="F",
        help="rows that experts of static shapes have, "
        "over those that are routed: what a rank of several needs for an uneven load (default: 1)",
    )
    pipeline = add("pipeline", "a whole step of a pipeline, under torchrun", _pipeline)
    pipeline_options(pipeline)
    context = add(
        "context",
        "training steps, rows over one number of ranks or over what they need, under torchrun",
        _context,
    )
    context_options(context)
    attention = add("attention", "the attention operation, by places for documents", _attention)
    attention_options(attention)
    padding = add(
        "padding", "places for tokens that stay empty in chosen buckets; needs no device", _padding
    )
    padding_options(padding)
    memory = add("memory", "bytes of a bank of buckets in one slot, against eager's peak", _memory)
    capture = add("capture", "seconds of capturing a bank of buckets", _capture)
    bank_options(memory, [1, 4, 8])
    bank_options(capture, [1, 8])
    offload_options(
        add(
            "offload",
            "activations on the host from inside a chunk graph, against kept ones; shares `of "
            "kept for backward` are of what a forward has saved and is alive when it ends",
            _offload,
        )
    )
    memory.add_argument("--compile", action="store_true", help="graphs of compiled code")
    capture.add_argument(
        "--ways",
        nargs="+",
        choices=CAPTURE_WAYS,
        default=list(CAPTURE_WAYS),
        metavar="WAY",
        help=f"(default: {' '.join(CAPTURE_WAYS)})",
    )
    return parser


def _problems(asked: argparse.Namespace) -> list[str]:
    """What no parser sees."""
    found = []
    given = vars(asked)
    if "mean" in given and (asked.mean <= 0 or asked.sigma < 0):
        found.append(
            f"--mean must be positive and --sigma not negative, got {asked.mean:g} and "
            f"{asked.sigma:g}"
        )
    if asked.seconds is not None and asked.seconds <= 0:
        found.append(f"--seconds must be positive, got {asked.seconds:g}")
    if given.get("ways") and len(set(asked.ways)) < len(asked.ways):
        found.append(f"--ways names a way twice: {' '.join(asked.ways)}")
    if given.get("room", 1.0) < 1:
        found.append(f"--room must be at least 1, got {asked.room:g}")
    if given.get("together") == 1:
        found.append("--together must be at least 2: every way is compared with the first one")
    if given.get("device", "auto") not in ("auto", "cpu", "cuda"):
        found.append(f"--device must be auto, cpu or cuda, got {asked.device!r}")
    if asked.out is not None:
        problem = path_problem(str(asked.out))
        if problem is None and asked.out.exists() and not asked.out.is_file():
            problem = "it is no file"
        if problem is None and not asked.out.resolve().parent.is_dir():
            problem = f"the folder {asked.out.resolve().parent} does not exist"
        if problem is not None:
            found.append(f"--out {shown(str(asked.out))}: {problem}")
    if not 0 <= asked.seed < 2**63:
        found.append(f"--seed must be at least 0 and below 2^63, got {asked.seed}")
    return found


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _shared(asked: argparse.Namespace, device: torch.device, *names: str) -> dict[str, object]:
    """Options of the work, and those called `names`."""
    small = device.type == "cpu"
    found = {
        "model": asked.model or asked.usual_models[small],
        "mean": asked.mean,
        "sigma": asked.sigma,
        "tokens": tuple(asked.tokens or ([128] if small else asked.usual_tokens)),
        "seed": asked.seed,
    }
    given = vars(asked)
    return found | {
        name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in names
    }


def _step(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = StepOptions(
        **_shared(  # type: ignore[arg-type]
            asked,
            device,
            "layers",
            "ways",
            "rounds",
            "calls",
            "part",
            "documents",
            "buckets",
            "attention",
            "together",
        ),
        **({"room": asked.room} if asked.benchmark == "moe" else {}),
    )
    columns = with_memory(STEP_COLUMNS) if asked.benchmark == "moe" else STEP_COLUMNS
    return _finish(
        rows,
        lambda: bench_step(options, device, rows, Deadline(asked.seconds)),
        f"bench {asked.benchmark}",
        columns,
    )


def _attention(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    shared = _shared(asked, device, "draws")
    config = shape(str(shared["model"]))
    options = AttentionOptions(ways=tuple(asked.ways or usual_backends(config, device)), **shared)  # type: ignore[arg-type]
    return _finish(
        rows,
        lambda: bench_attention(options, device, rows, Deadline(asked.seconds)),
        "bench attention",
        ATTENTION_COLUMNS,
    )


def _padding(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    rows = Rows(facts(torch.device("cpu"), asked.commit), asked.out)
    options = PaddingOptions(
        tuple(asked.ways), asked.tokens, asked.buckets, asked.documents, asked.seed
    )
    return _finish(
        rows,
        lambda: bench_padding(options, rows, Deadline(asked.seconds)),
        "bench padding",
        PADDING_COLUMNS,
    )


def _memory(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = MemoryOptions(
        **_shared(  # type: ignore[arg-type]
            asked, device, "layers", "part", "documents", "banks", "compile", "attention"
        )
    )
    return _finish(
        rows,
        lambda: bench_memory(options, device, rows, Deadline(asked.seconds)),
        "bench memory",
        MEMORY_COLUMNS,
    )


def _offload(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    # Half: torch may round what it pins up to a power of two.
    host_bytes = free_host_bytes() // 2 if asked.host_gib is None else int(asked.host_gib * 2**30)
    options = OffloadOptions(
        host_bytes=host_bytes,
        **_shared(  # type: ignore[arg-type]
            asked,
            device,
            "layers",
            "part",
            "documents",
            "ways",
            "modules",
            "lost",
            "in_flight",
            "min_bytes",
            "rounds",
            "largest",
            "compile",
            "attention",
            "draw",
        ),
    )
    return _finish(
        rows,
        lambda: bench_offload(options, device, rows, Deadline(asked.seconds)),
        "bench offload",
        OFFLOAD_COLUMNS,
    )


def _capture(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = CaptureOptions(
        **_shared(  # type: ignore[arg-type]
            asked, device, "layers", "part", "documents", "banks", "ways", "attention"
        )
    )
    return _finish(
        rows,
        lambda: bench_capture(options, device, rows, Deadline(asked.seconds)),
        "bench capture",
        CAPTURE_COLUMNS,
    )


def _pipeline(asked: argparse.Namespace) -> int:
    launch = Launch.read()
    ranks = asked.pp or launch.world
    problems = _problems(asked) + Layout(dp=1, pp=ranks).problems(launch.world)
    problems += legal_microbatches(ranks, asked.chunks, None, asked.microbatches)
    _refuse(problems)
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
    options = PipelineOptions(
        ranks=ranks,
        chunks=asked.chunks,
        microbatches=asked.microbatches,
        **_shared(
            asked,
            device,
            "layers",
            "documents",
            "ways",
            "rounds",  # type: ignore[arg-type]
            "together",
            "attention",
        ),
    )
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(
        rows,
        lambda: bench_pipeline(options, device, launch, rows, Deadline(asked.seconds)),
        f"bench pipeline on {ranks} ranks",
        PIPELINE_COLUMNS,
    )


def _context(asked: argparse.Namespace) -> int:
    launch = Launch.read()
    _refuse(_problems(asked))
    device = choose_device(asked.device, launch)
    work = _shared(
        asked, device, "layers", "places", "ways", "rounds", "microbatches", "granularity"
    )
    fixed = asked.fixed or min(4, launch.world)
    tokens = work["tokens"]
    assert isinstance(tokens, tuple)
    longest = asked.longest or min(8 * KILO, fixed * min(tokens))
    options = ContextBenchOptions(ranks=launch.world, fixed=fixed, longest=longest, **work)  # type: ignore[arg-type]
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(
        rows,
        lambda: bench_context(options, device, launch, rows, Deadline(asked.seconds)),
        f"bench context on {launch.world} ranks",
        CONTEXT_COLUMNS,
    )


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
