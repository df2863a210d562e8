"""`packgraph bench` with what only a checkout needs: baselines of others, and further benchmarks.

    PYTHONPATH=src python benchmarks/bench.py step --ways eager graphed-callables chunk
    PYTHONPATH=src python benchmarks/bench.py attention

The words and rows are those of `packgraph bench`. `step` and `moe` have the ways of others.py, too;
context, attention, padding and capture are benchmarks of parts.

    torchrun --nproc-per-node 4 benchmarks/bench.py context
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import bench_attention
import bench_capture
import bench_context
import bench_padding
from others import OTHERS

from packgraph.bench import step
from packgraph.bench.command import BENCHMARKS, Benchmark, bench
from packgraph.bench.moe_variants import MOE_WAYS
from packgraph.bench.options import FIRST
from packgraph.bench.variants import WAYS, Maker
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.values import option

ALL_WAYS: Mapping[str, Maker] = MappingProxyType({**step.ALL_WAYS, **OTHERS})
PEERS = tuple(name for name in OTHERS if name.startswith("transformers"))
STEP_WAYS = (*WAYS, *(name for name in OTHERS if name not in PEERS))
AnyWay = Annotated[str, tuple(ALL_WAYS)]


@dataclass(frozen=True, kw_only=True)
class AllStepArguments(step.StepArguments):
    """Forward and backward of one microbatch, by ways of others too."""

    makers: ClassVar[Mapping[str, Maker]] = ALL_WAYS
    ways: tuple[AnyWay, ...] = option(STEP_WAYS, FIRST)


@dataclass(frozen=True, kw_only=True)
class AllMoeArguments(step.MoeArguments):
    """As step, with defaults and ways for layers with experts."""

    makers: ClassVar[Mapping[str, Maker]] = ALL_WAYS
    ways: tuple[AnyWay, ...] = option((*MOE_WAYS, *PEERS), FIRST)


ALL: Mapping[str, Benchmark] = MappingProxyType(
    {
        **BENCHMARKS,
        "step": BENCHMARKS["step"]._replace(options=AllStepArguments),
        "moe": BENCHMARKS["moe"]._replace(options=AllMoeArguments),
        "context": Benchmark(
            bench_context.ContextArguments, bench_context.bench_context, bench_context.COLUMNS
        ),
        "attention": Benchmark(
            bench_attention.AttentionArguments,
            bench_attention.bench_attention,
            bench_attention.COLUMNS,
        ),
        "padding": Benchmark(
            bench_padding.PaddingArguments, bench_padding.bench_padding, bench_padding.COLUMNS
        ),
        "capture": Benchmark(
            bench_capture.CaptureArguments, bench_capture.bench_capture, bench_capture.COLUMNS
        ),
    }
)


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code."""
    try:
        return bench(sys.argv[1:] if words is None else words, ALL)
    except ConfigError as error:
        print(f"packgraph: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
