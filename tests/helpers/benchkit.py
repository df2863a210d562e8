"""Parts of models, microbatches and ways of benchmarks on a CPU."""

import torch
from bench import ALL_WAYS
from bench_models import (
    TimedPart,
    build_part,
    draw_batches,
    refit,
    squared_gradients,
    zero_gradients,
)
from bench_ways import Setting, Way

from packgraph.bench.comparison import room_for_code
from packgraph.models.config import DecoderConfig
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CPU, ONE = torch.device("cpu"), Capacity(32, 6)
SMALL = [
    *("--device", "cpu", "--model", "tiny", "--tokens", "32", "--documents", "4"),
    *("--mean", "10", "--sigma", "0.5"),
]

Made = tuple[DecoderStack, list[PackedBatch], Setting]


def make(
    part: str, config: DecoderConfig, count: int, buckets: tuple[Capacity, ...] = (ONE,)
) -> Made:
    """A part of a model, microbatches, and the setting of a comparison."""
    model = build_part(part, config, CPU, torch.float32)
    zero_gradients([model])
    draws = draw_batches(ONE, count, 300, mean=8, sigma=0.8, seed=0)
    work = TimedPart(model, 32, min(batch.num_tokens for batch in draws))
    return model, draws, Setting(work, model, ONE, buckets, compiler="aot_eager")


def make_way(name: str, setting: Setting) -> Way:
    """The way called `name`, those of a checkout too."""
    return ALL_WAYS[name](name, setting)


def results(
    way: Way, model: DecoderStack, draws: list[PackedBatch], work: TimedPart
) -> list[tuple[float, float]]:
    """Score of the output and norm of the gradients for each microbatch, after the way got
    ready."""
    batches = [refit(batch, way.capacity(batch)) for batch in draws]
    found = []
    with room_for_code():
        way.prepare(batches)
        for batch in batches:
            zero_gradients([model])
            with way.frozen():
                found.append((work.score(way.run(batch)), squared_gradients([model]) ** 0.5))
    assert way.complaint() is None
    return found
