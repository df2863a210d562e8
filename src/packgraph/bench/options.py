"""Options of `packgraph bench NAME`, by benchmark."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from packgraph.bench.context_steps import CONTEXT_WAYS, USUAL_WAYS
from packgraph.bench.models import DISTRIBUTIONS, PARTS, SHAPES
from packgraph.bench.moe_variants import EXPERT_WAYS
from packgraph.bench.offload import OFFLOAD_WAYS, USUAL_MODULES
from packgraph.bench.pipeline import PIPELINE_WAYS
from packgraph.bench.variants import STEP_WAYS
from packgraph.offloading.rules import MODULES
from packgraph.ops.attention.api import BACKENDS
from packgraph.parallel.context.request import PLACES

KILO = 1024
USUAL_MODELS = "qwen3-0.6b", "tiny"  # on CUDA, and on a CPU
CAPTURABLE = [name for name in BACKENDS if name != "naive"]


def pipeline_options(pipeline: argparse.ArgumentParser) -> None:
    work_options(pipeline, [KILO], documents=64)
    contest_options(pipeline, PIPELINE_WAYS, rounds=12)
    pipeline.add_argument(
        "--attention",
        choices=["auto", *BACKENDS],
        default="auto",
        help="attention of every way (default: auto, the fastest that there is; rows say which)",
    )
    pipeline.add_argument(
        "--pp", type=count, metavar="N", help="pipeline ranks (default: all processes)"
    )
    pipeline.add_argument(
        "--chunks", type=count, default=1, metavar="N", help="chunks per rank (default: 1)"
    )
    pipeline.add_argument(
        "--microbatches", type=count, default=8, metavar="N", help="in a step (default: 8)"
    )


def attention_options(attention: argparse.ArgumentParser) -> None:
    work_options(attention, [KILO * size for size in (1, 2, 4, 8, 16)])
    attention.add_argument(
        "--ways",
        nargs="+",
        choices=CAPTURABLE,
        metavar="BACKEND",
        help="backends (default: all that have kernels for this device)",
    )
    attention.add_argument(
        "--draws", type=count, default=5, metavar="N", help="microbatches (default: 5)"
    )


def bank_options(parser: argparse.ArgumentParser, banks: list[int]) -> None:
    work_options(parser, [8 * KILO], documents=64)
    part_option(parser)
    parser.add_argument(
        "--attention", choices=["auto", *CAPTURABLE], default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--banks",
        type=count,
        nargs="+",
        default=banks,
        metavar="K",
        help=f"numbers of buckets (default: {' '.join(map(str, banks))})",
    )


def padding_options(padding: argparse.ArgumentParser) -> None:
    padding.add_argument(
        "--ways",
        nargs="+",
        choices=list(DISTRIBUTIONS),
        default=list(DISTRIBUTIONS),
        metavar="LENGTHS",
        help=f"families of lengths (default: {' '.join(DISTRIBUTIONS)})",
    )
    padding.add_argument(
        "--tokens", type=count, default=8 * KILO, metavar="T", help="of the largest bucket"
    )
    padding.add_argument(
        "--buckets", type=count, default=8, metavar="K", help="at most (default: 8)"
    )
    padding.add_argument(
        "--documents", type=count, default=20_000, metavar="N", help="of a draw (default: 20000)"
    )


def offload_options(offload: argparse.ArgumentParser) -> None:
    work_options(offload, [8 * KILO, 16 * KILO], documents=64, models=("qwen3-8b", "tiny"))
    part_option(offload, "layers")
    offload.add_argument(
        "--ways",
        nargs="+",
        choices=OFFLOAD_WAYS,
        default=list(OFFLOAD_WAYS),
        metavar="WAY",
        help=f"those of {', '.join(OFFLOAD_WAYS)} to measure; kept always is (default: all)",
    )
    offload.add_argument(
        "--attention", choices=["auto", *CAPTURABLE], default="auto", help="(default: auto)"
    )
    offload.add_argument(
        "--modules",
        nargs="+",
        choices=MODULES,
        default=list(USUAL_MODULES),
        metavar="NAME",
        help=f"what may move (default: {' '.join(USUAL_MODULES)})",
    )
    offload.add_argument(
        "--lost",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="of the time, that the way `planned` may lose (default: 0.01)",
    )
    offload.add_argument(
        "--in-flight", type=count, default=2, metavar="N", help="copies to the host (default: 2)"
    )
    offload.add_argument(
        "--min-bytes", type=count, default=2**20, metavar="N", help="that move (default: 1 MiB)"
    )
    offload.add_argument("--rounds", type=count, default=9, metavar="N", help="(default: 9)")
    offload.add_argument(
        "--largest",
        type=int,
        default=0,
        metavar="T",
        help="look for the most tokens that run, in steps of T (default: 0, do not)",
    )
    offload.add_argument(
        "--host-gib",
        type=float,
        metavar="N",
        help="pinned memory that this search may take, by what the measured rows took per token in "
        "their first passes, which move all that may move (default: half of what is free)",
    )
    offload.add_argument(
        "--draw", type=Path, metavar="FOLDER", help="write pictures of the plans there"
    )
    offload.add_argument("--compile", action="store_true", help="graphs of compiled code")


def context_options(context: argparse.ArgumentParser) -> None:
    work_options(context, [2 * KILO], models=("gpt-2048", "tiny"))
    context.add_argument(
        "--ways",
        nargs="+",
        choices=CONTEXT_WAYS,
        default=list(USUAL_WAYS),
        metavar="WAY",
        help=f"of {' '.join(CONTEXT_WAYS)}; the first is what others are compared with; compiling "
        f"takes minutes (default: {' '.join(USUAL_WAYS)})",
    )
    context.add_argument("--rounds", type=count, default=18, metavar="N", help="(default: 18)")
    context.add_argument(
        "--fixed",
        type=count,
        metavar="N",
        help="ranks of every row of the fixed ways (default: 4, or all there are)",
    )
    context.add_argument(
        "--places",
        type=count,
        nargs="+",
        default=list(PLACES),
        metavar="N",
        help=f"for documents in a row (default: {' '.join(map(str, PLACES))})",
    )
    context.add_argument(
        "--longest",
        type=count,
        metavar="T",
        help="longest document (default: 8192, or what fits the fixed ways)",
    )
    context.add_argument(
        "--microbatches", type=count, default=8, metavar="N", help="in a step (default: 8)"
    )
    context.add_argument(
        "--granularity", choices=["layer", "chunk"], default="chunk", help="(default: chunk)"
    )


def step_options(
    step: argparse.ArgumentParser,
    ways: Sequence[str],
    tokens: list[int],
    models: tuple[str, str] = USUAL_MODELS,
    part: str = "model",
) -> None:
    """ways, tokens, models, part: defaults."""
    work_options(step, tokens, models=models)
    part_option(step, part)
    contest_options(step, ways, rounds=15, known=(*STEP_WAYS, *EXPERT_WAYS))
    step.add_argument(
        "--documents",
        type=count,
        metavar="N",
        help="places for documents of ways that have one shape (default: the most that occur)",
    )
    step.add_argument(
        "--calls",
        type=count,
        default=4,
        metavar="N",
        help="microbatches in a row without a wait (default: 4)",
    )
    step.add_argument(
        "--buckets",
        type=count,
        default=8,
        metavar="K",
        help="of the ways auto, at most (default: 8)",
    )
    step.add_argument(
        "--attention",
        choices=["own", *CAPTURABLE],
        default="own",
        help="attention of every way (default: own, what each way's own stack has; rows say which)",
    )


def part_option(parser: argparse.ArgumentParser, part: str = "model") -> None:
    parser.add_argument(
        "--part",
        choices=PARTS,
        default=part,
        help=f"the whole model, or its layers alone, without embedding and head (default: {part})",
    )


def work_options(
    parser: argparse.ArgumentParser,
    tokens: list[int],
    documents: int | None = None,
    models: tuple[str, str] = USUAL_MODELS,
) -> None:
    """models: the default on CUDA, and on a CPU."""
    parser.add_argument(
        "--model",
        choices=list(SHAPES),
        help=f"shape (default: {models[0]} on CUDA, {models[1]} on a CPU)",
    )
    parser.add_argument("--layers", type=count, metavar="N", help="another number of layers")
    parser.add_argument(
        "--tokens",
        type=count,
        nargs="+",
        metavar="T",
        help=f"tokens of a microbatch (default: {' '.join(map(str, tokens))}; 128 on a CPU)",
    )
    parser.add_argument(
        "--mean", type=float, default=1024.0, help="mean length of documents (default: 1024)"
    )
    parser.add_argument(
        "--sigma", type=float, default=1.5, help="of the lognormal distribution (default: 1.5)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.set_defaults(usual_tokens=tokens, usual_models=models)
    if documents is not None:
        parser.add_argument(
            "--documents",
            type=count,
            default=documents,
            metavar="N",
            help=f"at most in one microbatch (default: {documents})",
        )


def contest_options(
    parser: argparse.ArgumentParser, ways: Sequence[str], rounds: int, known: Sequence[str] = ()
) -> None:
    """ways: the default, which are all unless there are more of them in `known`."""
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=known or ways,
        default=list(ways),
        metavar="WAY",
        help=f"the first is what others are compared with (default: {' '.join(ways)})",
    )
    parser.add_argument(
        "--rounds", type=count, default=rounds, metavar="N", help=f"(default: {rounds})"
    )
    parser.add_argument(
        "--together",
        type=count,
        metavar="N",
        help="measure so many ways side by side, the first "
        "always among them, and free them before the next: less memory (default: all)",
    )


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
