"""The benchmarks: ways of running the same packed documents, timed in turn, a JSON line per row.

    PYTHONPATH=src python benchmarks/bench.py step --ways eager graphed-callables chunk
    PYTHONPATH=src python benchmarks/bench.py offload --model qwen3-8b --layers 8 --tokens 8192
    torchrun --nproc-per-node 4 benchmarks/bench.py pipeline --model qwen3-8b --chunks 2
    torchrun --nproc-per-node 2 benchmarks/bench.py shard --model qwen3-0.6b --tokens 4096

`step` and `moe` have the ways of bench_ways.py, others.py and expert_ways.py.
pipeline, shard and context are steps of several ranks; integrations those of a model of
transformers; memory, offload, capture, attention and padding are benchmarks of parts.

`--golden FILE` compares with the rows of an earlier run on the same device, and fails where time or
memory is more than 5 % worse: golden.py.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
import bench_step as step
from bench_command import Benchmark, bench
from bench_step import FIRST
from bench_ways import WAYS, Maker
from expert_ways import EXPERT_WAYS, MOE_WAYS, ExpertComparison, with_memory
from golden import with_golden
from others import OTHERS
from result_rows import commit_of_source
from step_figures import STEP_COLUMNS

from packgraph.train.config.reading import ConfigError, option

ALL_WAYS: Mapping[str, Maker] = MappingProxyType({**step.MAKERS, **EXPERT_WAYS, **OTHERS})
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
    """Forward and backward of layers with experts: step with other defaults and ways."""

    makers: ClassVar[Mapping[str, Maker]] = ALL_WAYS
    ways: tuple[AnyWay, ...] = option((*MOE_WAYS, *PEERS), FIRST)
    room: float = option(
        1.0,
        "rows that experts of static shapes have, over those that are routed: what a rank of "
        "several needs for an uneven load",
        metavar="F",
    )

    def problems(self) -> list[str]:
        """Lists what is wrong with further options."""
        small = [] if self.room >= 1 else [f"--room must be at least 1, got {self.room:g}"]
        return super().problems() + small


measure_step = partial(step.bench_step, comparison=ExpertComparison)


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
            "step": Benchmark(AllStepArguments, measure_step, STEP_COLUMNS),
            "moe": Benchmark(AllMoeArguments, measure_step, with_memory(STEP_COLUMNS)),
            **PARTS,
        }.items()
    }
)


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code."""
    try:
        words = sys.argv[1:] if words is None else words
        return bench(words, ALL, commit_of_source())
    except ConfigError as error:
        print(f"packgraph: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
