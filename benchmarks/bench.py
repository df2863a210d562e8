"""`packgraph bench` with what only a checkout needs: further benchmarks, and baselines of others.

    PYTHONPATH=src python benchmarks/bench.py step --ways eager graphed-callables chunk
    PYTHONPATH=src python benchmarks/bench.py offload --model qwen3-8b --layers 8 --tokens 8192
    torchrun --nproc-per-node 4 benchmarks/bench.py pipeline --model qwen3-8b --chunks 2
    torchrun --nproc-per-node 2 benchmarks/bench.py shard --model qwen3-0.6b --tokens 4096

The words and rows are those of `packgraph bench`. `step` and `moe` have the ways of others.py, too.
pipeline, shard and context are steps of several ranks; integrations those of a model of
transformers; memory, offload, capture, attention and padding are benchmarks of parts.

`--golden FILE` compares with the rows of an earlier run on the same device, and fails where time or
memory is more than 5 % worse: golden.py.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import bench_attention
import bench_capture
import bench_context
import bench_integrations
import bench_memory
import bench_offload
import bench_padding
import bench_pipeline
import bench_shard
from golden import with_golden
from others import OTHERS

from packgraph.bench import step
from packgraph.bench.command import BENCHMARKS, Benchmark, bench
from packgraph.bench.moe_variants import MOE_WAYS
from packgraph.bench.options import FIRST
from packgraph.bench.variants import WAYS, Maker
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.values import option

COMMAND = "python benchmarks/bench.py"
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


PARTS = {
    "integrations": Benchmark(
        bench_integrations.IntegrationArguments,
        bench_integrations.bench_integrations,
        bench_integrations.COLUMNS,
    ),
    "pipeline": Benchmark(
        bench_pipeline.PipelineArguments, bench_pipeline.bench_pipeline, bench_pipeline.COLUMNS
    ),
    "shard": Benchmark(bench_shard.ShardArguments, bench_shard.bench_shard, bench_shard.COLUMNS),
    "context": Benchmark(
        bench_context.ContextArguments, bench_context.bench_context, bench_context.COLUMNS
    ),
    "memory": Benchmark(
        bench_memory.MemoryArguments, bench_memory.bench_memory, bench_memory.COLUMNS
    ),
    "offload": Benchmark(
        bench_offload.OffloadArguments, bench_offload.bench_offload, bench_offload.COLUMNS
    ),
    "attention": Benchmark(
        bench_attention.AttentionArguments, bench_attention.bench_attention, bench_attention.COLUMNS
    ),
    "padding": Benchmark(
        bench_padding.PaddingArguments, bench_padding.bench_padding, bench_padding.COLUMNS
    ),
    "capture": Benchmark(
        bench_capture.CaptureArguments, bench_capture.bench_capture, bench_capture.COLUMNS
    ),
}
ALL: Mapping[str, Benchmark] = MappingProxyType(
    {
        name: with_golden(one)
        for name, one in {
            "step": BENCHMARKS["step"]._replace(options=AllStepArguments),
            "moe": BENCHMARKS["moe"]._replace(options=AllMoeArguments),
            **PARTS,
        }.items()
    }
)


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code."""
    try:
        return bench(sys.argv[1:] if words is None else words, ALL, COMMAND)
    except ConfigError as error:
        print(f"packgraph: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
