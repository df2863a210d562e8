"""`packgraph bench NAME`: read the options, say at once all that is wrong with them, run, print a table."""
import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from packgraph.bench.models import SHAPES
from packgraph.bench.pipeline import COLUMNS as PIPELINE_COLUMNS
from packgraph.bench.pipeline import PIPELINE_WAYS, PipelineOptions, bench_pipeline
from packgraph.bench.rows import Rows, facts
from packgraph.bench.step import COLUMNS as STEP_COLUMNS
from packgraph.bench.step import StepOptions, bench_step
from packgraph.bench.timing import Deadline
from packgraph.bench.ways import STEP_WAYS
from packgraph.ops.attention import BACKENDS
from packgraph.parallel.mesh import Layout
from packgraph.parallel.processes import Launch
from packgraph.plan.schedule import legal_microbatches
from packgraph.train.config import ConfigError
from packgraph.train.launch import choose_device

FAILED = 1

INTRODUCTION = """Time the ways of running the same packed documents, side by side in one process.

    packgraph bench step --model qwen3-0.6b --tokens 1024 4096
    torchrun --nproc-per-node 4 -m packgraph.cli bench pipeline --model qwen3-8b --layers 16 --chunks 2

One JSON line per row goes to stdout (and to the end of FILE with --out), a table to stderr. A way that cannot run
gets a row with the reason."""


def bench(words: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code: 1 when nothing could be measured. Raises ConfigError."""
    parser = _parser()
    try:
        asked = parser.parse_args(list(words) or ["--help"])
    except SystemExit as end:
        return int(end.code or 0)
    if asked.benchmark == "step":
        return _step(asked)
    return _pipeline(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="packgraph bench", description=INTRODUCTION, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    step = benchmarks.add_parser("step", help="forward and backward of one microbatch", allow_abbrev=False)
    _common(step, STEP_WAYS, [1024, 2048, 4096], rounds=15)
    step.add_argument("--calls", type=_count, default=4, metavar="N",
                      help="microbatches in a row that are timed together (default: 4)")
    pipeline = benchmarks.add_parser("pipeline", help="a whole step of a pipeline, under torchrun", allow_abbrev=False)
    _common(pipeline, PIPELINE_WAYS, [1024], rounds=12)
    pipeline.add_argument("--pp", type=_count, metavar="N", help="pipeline ranks (default: all processes)")
    pipeline.add_argument("--chunks", type=_count, default=1, metavar="N", help="chunks per rank (default: 1)")
    pipeline.add_argument("--microbatches", type=_count, default=8, metavar="N", help="in a step (default: 8)")
    return parser


def _common(parser: argparse.ArgumentParser, ways: Sequence[str], tokens: list[int], rounds: int) -> None:
    parser.add_argument("--model", choices=list(SHAPES), help="shape (default: qwen3-0.6b on CUDA, tiny on a CPU)")
    parser.add_argument("--layers", type=_count, metavar="N", help="another number of layers")
    parser.add_argument("--tokens", type=_count, nargs="+", metavar="T",
                        help=f"tokens of a microbatch (default: {' '.join(map(str, tokens))}; 128 on a CPU)")
    parser.add_argument("--documents", type=_count, default=64, metavar="N", help="at most in one (default: 64)")
    parser.add_argument("--mean", type=float, default=1024.0, help="mean length of documents (default: 1024)")
    parser.add_argument("--sigma", type=float, default=1.5, help="of the lognormal distribution (default: 1.5)")
    parser.add_argument("--attention", choices=["auto", *BACKENDS], default="auto",
                        help="attention of every way (default: auto, the fastest that there is; rows say which)")
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways), metavar="WAY",
                        help=f"the first is what others are compared with (default: {' '.join(ways)})")
    parser.add_argument("--rounds", type=_count, default=rounds, metavar="N", help=f"(default: {rounds})")
    parser.add_argument("--one-at-a-time", action="store_true",
                        help="measure each way alone with the first one, and free it before the next: less memory")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no further way or round after this time")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this file, too")
    parser.add_argument("--commit", help="what rows say about the commit, where there is no git checkout")
    parser.set_defaults(usual_tokens=tokens)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _problems(asked: argparse.Namespace) -> list[str]:
    """What no parser sees."""
    found = []
    if asked.mean <= 0 or asked.sigma < 0:
        found.append(f"--mean must be positive and --sigma not negative, got {asked.mean:g} and {asked.sigma:g}")
    if asked.seconds is not None and asked.seconds <= 0:
        found.append(f"--seconds must be positive, got {asked.seconds:g}")
    if len(set(asked.ways)) < len(asked.ways):
        found.append(f"--ways names a way twice: {' '.join(asked.ways)}")
    if asked.device not in ("auto", "cpu", "cuda"):
        found.append(f"--device must be auto, cpu or cuda, got {asked.device!r}")
    if asked.out is not None and not asked.out.resolve().parent.is_dir():
        found.append(f"--out: the folder {asked.out.resolve().parent} does not exist")
    return found


def _shared(asked: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Options that both benchmarks have."""
    small = device.type == "cpu"
    return {"model": asked.model or ("tiny" if small else "qwen3-0.6b"), "layers": asked.layers,
            "tokens": tuple(asked.tokens or ([128] if small else asked.usual_tokens)), "documents": asked.documents,
            "ways": tuple(asked.ways), "rounds": asked.rounds, "mean": asked.mean, "sigma": asked.sigma,
            "seed": asked.seed, "one_at_a_time": asked.one_at_a_time, "attention": asked.attention}


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _step(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = StepOptions(calls=asked.calls, **_shared(asked, device))  # type: ignore[arg-type]
    return _finish(rows, lambda: bench_step(options, device, rows, Deadline(asked.seconds)), "bench step", STEP_COLUMNS)


def _pipeline(asked: argparse.Namespace) -> int:
    launch = Launch.read()
    ranks = asked.pp or launch.world
    problems = _problems(asked) + Layout(dp=1, pp=ranks).problems(launch.world)
    problems += legal_microbatches(ranks, asked.chunks, None, asked.microbatches)
    _refuse(problems)
    device = choose_device(asked.device)
    if device.type == "cuda" and launch.local_rank >= torch.cuda.device_count():
        _refuse([f"process {launch.local_rank} of this host has no GPU: there are {torch.cuda.device_count()}; start "
                 "fewer processes (torchrun --nproc-per-node), or use --device cpu"])
    device = torch.device("cuda", launch.local_rank) if device.type == "cuda" else device
    options = PipelineOptions(ranks=ranks, chunks=asked.chunks, microbatches=asked.microbatches,
                              **_shared(asked, device))  # type: ignore[arg-type]
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(rows, lambda: bench_pipeline(options, device, launch, rows, Deadline(asked.seconds)),
                   f"bench pipeline on {ranks} ranks", PIPELINE_COLUMNS)


def _finish(rows: Rows, run: Callable[[], None], title: str, columns: Sequence[tuple[str, Callable]]) -> int:
    """Run; print the table of what there is, even after an error or an interruption."""
    try:
        run()
    finally:
        rows.print_table(title, columns)
    return 0 if rows.measured else FAILED
