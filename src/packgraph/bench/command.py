"""`packgraph bench NAME`: read the options, say at once all that is wrong with them, run, print a table."""
import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from packgraph.bench.attention import COLUMNS as ATTENTION_COLUMNS
from packgraph.bench.attention import AttentionOptions, bench_attention, usual_backends
from packgraph.bench.capture import CAPTURE_WAYS, CaptureOptions, bench_capture
from packgraph.bench.capture import COLUMNS as CAPTURE_COLUMNS
from packgraph.bench.context import COLUMNS as CONTEXT_COLUMNS
from packgraph.bench.context import ContextBenchOptions, bench_context
from packgraph.bench.context_variant import CONTEXT_WAYS, USUAL_WAYS
from packgraph.bench.copies import free_host_bytes
from packgraph.bench.distributions import DISTRIBUTIONS
from packgraph.bench.expert_memory import with_memory
from packgraph.bench.memory import COLUMNS as MEMORY_COLUMNS
from packgraph.bench.memory import MemoryOptions, bench_memory
from packgraph.bench.models import SHAPES, shape
from packgraph.bench.moe_variants import EXPERT_WAYS, MOE_WAYS
from packgraph.bench.offload import COLUMNS as OFFLOAD_COLUMNS
from packgraph.bench.offload import OFFLOAD_WAYS, USUAL_MODULES, OffloadOptions, bench_offload
from packgraph.bench.padding import COLUMNS as PADDING_COLUMNS
from packgraph.bench.padding import PaddingOptions, bench_padding
from packgraph.bench.parts import PARTS
from packgraph.bench.pipeline import COLUMNS as PIPELINE_COLUMNS
from packgraph.bench.pipeline import PIPELINE_WAYS, PipelineOptions, bench_pipeline
from packgraph.bench.rows import Rows, facts
from packgraph.bench.step import COLUMNS as STEP_COLUMNS
from packgraph.bench.step import StepOptions, bench_step
from packgraph.bench.timing import Deadline
from packgraph.bench.variants import STEP_WAYS
from packgraph.offloading.rules import MODULES
from packgraph.ops.attention.api import BACKENDS
from packgraph.parallel.context.request import PLACES
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pipeline.schedule import legal_microbatches
from packgraph.parallel.processes import Launch
from packgraph.train.config import ConfigError
from packgraph.train.config_values import path_problem, shown
from packgraph.train.launch import choose_device

FAILED = 1
KILO = 1024
USUAL_MODELS = "qwen3-0.6b", "tiny"  # on CUDA, and on a CPU
CAPTURABLE = [name for name in BACKENDS if name != "naive"]

INTRODUCTION = """Time the ways of running the same packed documents, side by side in one process.

    packgraph bench step --model qwen3-0.6b --part layers --tokens 1024 4096
    packgraph bench moe
    torchrun --nproc-per-node 4 -m packgraph.cli bench pipeline --model qwen3-8b --layers 16 --chunks 2
    packgraph bench padding

One JSON line per row goes to stdout (and to the end of FILE with --out), a table to stderr. What cannot be measured
gets a row with the reason."""


def bench(words: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code: 1 when nothing could be measured. Raises ConfigError."""
    parser = _parser()
    try:
        asked = parser.parse_args(list(words) or ["--help"])
    except SystemExit as end:
        return int(end.code or 0)
    return asked.run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="packgraph bench", description=INTRODUCTION, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        found = benchmarks.add_parser(name, help=text, description=text, allow_abbrev=False)
        found.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
        found.add_argument("--seconds", type=float, metavar="S", help="begin nothing further after this time")
        found.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this file, too")
        found.add_argument("--commit", help="what rows say about the commit, where there is no git checkout")
        found.set_defaults(run=run)
        return found

    _step_options(add("step", "forward and backward of one microbatch", _step), STEP_WAYS, [KILO, 2 * KILO, 4 * KILO])
    moe = add("moe", "as step, with the defaults and ways of layers with experts (host-splits, partial, stash)", _step)
    _step_options(moe, MOE_WAYS, [KILO, 4 * KILO, 16 * KILO], ("moonlight", "moonlight-tiny"), "layers")
    moe.add_argument("--room", type=float, default=1.0, metavar="F", help="rows that experts of static shapes have, "
                     "over those that are routed: what a rank of several needs for an uneven load (default: 1)")
    pipeline = add("pipeline", "a whole step of a pipeline, under torchrun", _pipeline)
    _work_options(pipeline, [KILO], documents=64)
    _contest_options(pipeline, PIPELINE_WAYS, rounds=12)
    pipeline.add_argument("--attention", choices=["auto", *BACKENDS], default="auto",
                          help="attention of every way (default: auto, the fastest that there is; rows say which)")
    pipeline.add_argument("--pp", type=_count, metavar="N", help="pipeline ranks (default: all processes)")
    pipeline.add_argument("--chunks", type=_count, default=1, metavar="N", help="chunks per rank (default: 1)")
    pipeline.add_argument("--microbatches", type=_count, default=8, metavar="N", help="in a step (default: 8)")
    context = add("context", "training steps, rows over one number of ranks or over what they need, under torchrun",
                  _context)
    _context_options(context)
    attention = add("attention", "the attention operation, by places for documents", _attention)
    _work_options(attention, [KILO * size for size in (1, 2, 4, 8, 16)])
    attention.add_argument("--ways", nargs="+", choices=CAPTURABLE, metavar="BACKEND",
                           help="backends (default: all that have kernels for this device)")
    attention.add_argument("--draws", type=_count, default=5, metavar="N", help="microbatches (default: 5)")
    padding = add("padding", "places for tokens that stay empty in chosen buckets; needs no device", _padding)
    padding.add_argument("--ways", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS),
                         metavar="LENGTHS", help=f"families of lengths (default: {' '.join(DISTRIBUTIONS)})")
    padding.add_argument("--tokens", type=_count, default=8 * KILO, metavar="T", help="of the largest bucket")
    padding.add_argument("--buckets", type=_count, default=8, metavar="K", help="at most (default: 8)")
    padding.add_argument("--documents", type=_count, default=20_000, metavar="N", help="of a draw (default: 20000)")
    memory = add("memory", "bytes of a bank of buckets in one slot, against eager's peak", _memory)
    capture = add("capture", "seconds of capturing a bank of buckets", _capture)
    for parser_of_bank, banks in ((memory, [1, 4, 8]), (capture, [1, 8])):
        _work_options(parser_of_bank, [8 * KILO], documents=64)
        _part_option(parser_of_bank)
        parser_of_bank.add_argument("--attention", choices=["auto", *CAPTURABLE], default="auto",
                                    help="(default: auto)")
        parser_of_bank.add_argument("--banks", type=_count, nargs="+", default=banks, metavar="K",
                                    help=f"numbers of buckets (default: {' '.join(map(str, banks))})")
    _offload_options(add("offload", "activations on the host from inside a chunk graph, against kept ones; shares `of "
                         "kept for backward` are of what a forward has saved and is alive when it ends", _offload))
    memory.add_argument("--compile", action="store_true", help="graphs of compiled code")
    capture.add_argument("--ways", nargs="+", choices=CAPTURE_WAYS, default=list(CAPTURE_WAYS), metavar="WAY",
                         help=f"(default: {' '.join(CAPTURE_WAYS)})")
    return parser


def _offload_options(offload: argparse.ArgumentParser) -> None:
    _work_options(offload, [8 * KILO, 16 * KILO], documents=64, models=("qwen3-8b", "tiny"))
    _part_option(offload, "layers")
    offload.add_argument("--ways", nargs="+", choices=OFFLOAD_WAYS, default=list(OFFLOAD_WAYS), metavar="WAY",
                         help=f"those of {', '.join(OFFLOAD_WAYS)} to measure; kept always is (default: all)")
    offload.add_argument("--attention", choices=["auto", *CAPTURABLE], default="auto", help="(default: auto)")
    offload.add_argument("--modules", nargs="+", choices=MODULES, default=list(USUAL_MODULES), metavar="NAME",
                         help=f"what may move (default: {' '.join(USUAL_MODULES)})")
    offload.add_argument("--lost", type=float, default=0.01, metavar="SHARE",
                         help="of the time, that the way `planned` may lose (default: 0.01)")
    offload.add_argument("--in-flight", type=_count, default=2, metavar="N", help="copies to the host (default: 2)")
    offload.add_argument("--min-bytes", type=_count, default=2**20, metavar="N", help="that move (default: 1 MiB)")
    offload.add_argument("--rounds", type=_count, default=9, metavar="N", help="(default: 9)")
    offload.add_argument("--largest", type=int, default=0, metavar="T",
                         help="look for the most tokens that run, in steps of T (default: 0, do not)")
    offload.add_argument("--host-gib", type=float, metavar="N",
                         help="pinned memory that this search may take, by what the measured rows took per token in "
                              "their first passes, which move all that may move (default: half of what is free)")
    offload.add_argument("--draw", type=Path, metavar="FOLDER", help="write pictures of the plans there")
    offload.add_argument("--compile", action="store_true", help="graphs of compiled code")


def _context_options(context: argparse.ArgumentParser) -> None:
    _work_options(context, [2 * KILO], models=("gpt-2048", "tiny"))
    context.add_argument("--ways", nargs="+", choices=CONTEXT_WAYS, default=list(USUAL_WAYS), metavar="WAY",
                         help=f"of {' '.join(CONTEXT_WAYS)}; the first is what others are compared with; compiling "
                         f"takes minutes (default: {' '.join(USUAL_WAYS)})")
    context.add_argument("--rounds", type=_count, default=18, metavar="N", help="(default: 18)")
    context.add_argument("--fixed", type=_count, metavar="N", help="ranks of every row of the fixed ways (default: 4, "
                         "or all there are)")
    context.add_argument("--places", type=_count, nargs="+", default=list(PLACES), metavar="N",
                         help=f"for documents in a row (default: {' '.join(map(str, PLACES))})")
    context.add_argument("--longest", type=_count, metavar="T", help="longest document (default: 8192, or what fits "
                         "the fixed ways)")
    context.add_argument("--microbatches", type=_count, default=8, metavar="N", help="in a step (default: 8)")
    context.add_argument("--granularity", choices=["layer", "chunk"], default="chunk", help="(default: chunk)")


def _step_options(step: argparse.ArgumentParser, ways: Sequence[str], tokens: list[int],
                  models: tuple[str, str] = USUAL_MODELS, part: str = "model") -> None:
    """ways, tokens, models, part: defaults."""
    _work_options(step, tokens, models=models)
    _part_option(step, part)
    _contest_options(step, ways, rounds=15, known=(*STEP_WAYS, *EXPERT_WAYS))
    step.add_argument("--documents", type=_count, metavar="N",
                      help="places for documents of ways that have one shape (default: the most that occur)")
    step.add_argument("--calls", type=_count, default=4, metavar="N",
                      help="microbatches in a row without a wait (default: 4)")
    step.add_argument("--buckets", type=_count, default=8, metavar="K", help="of the ways auto, at most (default: 8)")
    step.add_argument("--attention", choices=["own", *CAPTURABLE], default="own",
                      help="attention of every way (default: own, what each way's own stack has; rows say which)")


def _part_option(parser: argparse.ArgumentParser, part: str = "model") -> None:
    parser.add_argument("--part", choices=PARTS, default=part,
                        help=f"the whole model, or its layers alone, without embedding and head (default: {part})")


def _work_options(parser: argparse.ArgumentParser, tokens: list[int], documents: int | None = None,
                  models: tuple[str, str] = USUAL_MODELS) -> None:
    """models: the default on CUDA, and on a CPU."""
    parser.add_argument("--model", choices=list(SHAPES), help=f"shape (default: {models[0]} on CUDA, {models[1]} on a "
                        "CPU)")
    parser.add_argument("--layers", type=_count, metavar="N", help="another number of layers")
    parser.add_argument("--tokens", type=_count, nargs="+", metavar="T",
                        help=f"tokens of a microbatch (default: {' '.join(map(str, tokens))}; 128 on a CPU)")
    parser.add_argument("--mean", type=float, default=1024.0, help="mean length of documents (default: 1024)")
    parser.add_argument("--sigma", type=float, default=1.5, help="of the lognormal distribution (default: 1.5)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(usual_tokens=tokens, usual_models=models)
    if documents is not None:
        parser.add_argument("--documents", type=_count, default=documents, metavar="N",
                            help=f"at most in one microbatch (default: {documents})")


def _contest_options(parser: argparse.ArgumentParser, ways: Sequence[str], rounds: int, known: Sequence[str] = ()
                     ) -> None:
    """ways: the default, which are all unless there are more of them in `known`."""
    parser.add_argument("--ways", nargs="+", choices=known or ways, default=list(ways), metavar="WAY",
                        help=f"the first is what others are compared with (default: {' '.join(ways)})")
    parser.add_argument("--rounds", type=_count, default=rounds, metavar="N", help=f"(default: {rounds})")
    parser.add_argument("--together", type=_count, metavar="N", help="measure so many ways side by side, the first "
                        "always among them, and free them before the next: less memory (default: all)")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _problems(asked: argparse.Namespace) -> list[str]:
    """What no parser sees."""
    found = []
    given = vars(asked)
    if "mean" in given and (asked.mean <= 0 or asked.sigma < 0):
        found.append(f"--mean must be positive and --sigma not negative, got {asked.mean:g} and {asked.sigma:g}")
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
    found = {"model": asked.model or asked.usual_models[small], "mean": asked.mean, "sigma": asked.sigma,
             "tokens": tuple(asked.tokens or ([128] if small else asked.usual_tokens)), "seed": asked.seed}
    given = vars(asked)
    return found | {name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in names}


def _step(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = StepOptions(**_shared(  # type: ignore[arg-type]
        asked, device, "layers", "ways", "rounds", "calls", "part", "documents", "buckets", "attention", "together"),
        **({"room": asked.room} if asked.benchmark == "moe" else {}))
    columns = with_memory(STEP_COLUMNS) if asked.benchmark == "moe" else STEP_COLUMNS
    return _finish(rows, lambda: bench_step(options, device, rows, Deadline(asked.seconds)), f"bench {asked.benchmark}",
                   columns)


def _attention(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    shared = _shared(asked, device, "draws")
    config = shape(str(shared["model"]))
    options = AttentionOptions(ways=tuple(asked.ways or usual_backends(config, device)), **shared)  # type: ignore[arg-type]
    return _finish(rows, lambda: bench_attention(options, device, rows, Deadline(asked.seconds)), "bench attention",
                   ATTENTION_COLUMNS)


def _padding(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    rows = Rows(facts(torch.device("cpu"), asked.commit), asked.out)
    options = PaddingOptions(tuple(asked.ways), asked.tokens, asked.buckets, asked.documents, asked.seed)
    return _finish(rows, lambda: bench_padding(options, rows, Deadline(asked.seconds)), "bench padding",
                   PADDING_COLUMNS)


def _memory(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = MemoryOptions(**_shared(  # type: ignore[arg-type]
        asked, device, "layers", "part", "documents", "banks", "compile", "attention"))
    return _finish(rows, lambda: bench_memory(options, device, rows, Deadline(asked.seconds)), "bench memory",
                   MEMORY_COLUMNS)


def _offload(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    # Half: torch may round what it pins up to a power of two.
    host_bytes = free_host_bytes() // 2 if asked.host_gib is None else int(asked.host_gib * 2**30)
    options = OffloadOptions(host_bytes=host_bytes, **_shared(  # type: ignore[arg-type]
        asked, device, "layers", "part", "documents", "ways", "modules", "lost", "in_flight", "min_bytes", "rounds",
        "largest", "compile", "attention", "draw"))
    return _finish(rows, lambda: bench_offload(options, device, rows, Deadline(asked.seconds)), "bench offload",
                   OFFLOAD_COLUMNS)


def _capture(asked: argparse.Namespace) -> int:
    _refuse(_problems(asked))
    device = choose_device(asked.device)
    rows = Rows(facts(device, asked.commit), asked.out)
    options = CaptureOptions(**_shared(  # type: ignore[arg-type]
        asked, device, "layers", "part", "documents", "banks", "ways", "attention"))
    return _finish(rows, lambda: bench_capture(options, device, rows, Deadline(asked.seconds)), "bench capture",
                   CAPTURE_COLUMNS)


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
                              **_shared(asked, device, "layers", "documents", "ways", "rounds",  # type: ignore[arg-type]
                                        "together", "attention"))
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(rows, lambda: bench_pipeline(options, device, launch, rows, Deadline(asked.seconds)),
                   f"bench pipeline on {ranks} ranks", PIPELINE_COLUMNS)


def _context(asked: argparse.Namespace) -> int:
    launch = Launch.read()
    _refuse(_problems(asked))
    device = choose_device(asked.device, launch)
    work = _shared(asked, device, "layers", "places", "ways", "rounds", "microbatches", "granularity")
    fixed = asked.fixed or min(4, launch.world)
    tokens = work["tokens"]
    assert isinstance(tokens, tuple)
    longest = asked.longest or min(8 * KILO, fixed * min(tokens))
    options = ContextBenchOptions(ranks=launch.world, fixed=fixed, longest=longest, **work)  # type: ignore[arg-type]
    _refuse(options.problems())
    rows = Rows(facts(device, asked.commit), asked.out, write=launch.rank == 0)
    return _finish(rows, lambda: bench_context(options, device, launch, rows, Deadline(asked.seconds)),
                   f"bench context on {launch.world} ranks", CONTEXT_COLUMNS)


def _finish(rows: Rows, run: Callable[[], None], title: str, columns: Sequence[tuple[str, Callable]]) -> int:
    """Run; print the table of what there is, even after an error, an interruption or the end of a time limit."""
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        run()
    finally:
        signal.signal(signal.SIGTERM, before)
        rows.print_table(title, columns)
    return 0 if rows.measured else FAILED


def _stop(number: int, frame: object) -> None:
    """`timeout` and job schedulers ask to end by SIGTERM: rows that are measured shall not be lost."""
    raise KeyboardInterrupt
