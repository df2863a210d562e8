"""`packgraph bench capture`: how long graphs take to capture, per layer and bucket.

capture_seconds is what `build` takes for a declared bank after a first step in every shape: dry
run, capture of forward and backward, instantiation. Compiling comes before it and is told apart
(compile_seconds). prepare_seconds is all together, to the end of the first replays: how long
training stands still once.
"""

import itertools
import time
from dataclasses import dataclass
from functools import partial

import torch

from packgraph.bench.bank import bank_shapes, one_each
from packgraph.bench.comparison import attempt_alone
from packgraph.bench.models import dtype_on, shape, zero_gradients
from packgraph.bench.parts import TimedPart, build_part, twin
from packgraph.bench.rows import Column, Row, Rows, value
from packgraph.bench.timing import Deadline, start_anew, synchronize
from packgraph.bench.variants import Graphed, room_for_code
from packgraph.models.stack import DecoderStack

CAPTURE_WAYS = ("layer", "chunk", "layer+compile", "chunk+compile")

COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("buckets", value("buckets")),
    ("capture s", value("capture_seconds", ".2f")),
    (
        "ms / layer and bucket",
        lambda row: (
            "-"
            if row.get("capture_layer_seconds") is None
            else f"{1000 * row['capture_layer_seconds']:.1f}"
        ),
    ),
    ("compile s", value("compile_seconds", ".1f")),
    ("prepare s", value("prepare_seconds", ".1f")),
]


@dataclass(frozen=True)
class CaptureOptions:
    """What to measure. tokens: of the largest bucket. banks: numbers of buckets."""

    model: str
    layers: int | None
    part: str
    tokens: tuple[int, ...]
    ways: tuple[str, ...] = CAPTURE_WAYS
    documents: int = 64
    banks: tuple[int, ...] = (1, 8)
    compiler: str = "inductor"
    attention: str = "auto"
    mean: float = 1024.0
    sigma: float = 1.5
    seed: int = 0


def bench_capture(
    options: CaptureOptions, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for each number of tokens, bank and way."""
    model = build_part(options.part, shape(options.model, options.layers), device, dtype_on(device))
    zero_gradients([model])
    model = twin(model, options.attention)
    for tokens, name, buckets in itertools.product(options.tokens, options.ways, options.banks):
        with room_for_code():
            found, reason = attempt_alone(
                partial(_measure, options, model, device, name, tokens, buckets), deadline
            )
        start_anew(device)
        rows.add(
            {
                "benchmark": "capture",
                "way": name,
                "part": options.part,
                "model": options.model,
                "layers": model.config.num_layers,
                "tokens": tokens,
                "documents": options.documents,
                "buckets": buckets,
                "attention": model.attention_choice().name,
                "reason": reason,
            }
            | (found or {})
        )


def _measure(
    options: CaptureOptions,
    model: DecoderStack,
    device: torch.device,
    name: str,
    tokens: int,
    buckets: int,
) -> Row:
    granularity, _, compiled = name.partition("+")
    shapes = bank_shapes(tokens, options.documents, buckets)
    drawn = one_each(
        shapes, model.config.vocab_size, mean=options.mean, sigma=options.sigma, seed=options.seed
    )
    work = TimedPart(model, tokens, real=min(batch.num_tokens for batch in drawn))
    batches = [batch.to(device) for batch in drawn]
    synchronize(device)
    began = time.perf_counter()
    way = Graphed(name, work, shapes, granularity, options.compiler if compiled else False)
    try:
        way.prepare(batches)
        synchronize(device)
        seconds = time.perf_counter() - began
        facts = way.facts()
        return {
            "capture_seconds": facts["capture_seconds"],
            "capture_layer_seconds": facts["capture_layer_seconds"],
            "compile_seconds": round(way.graphed.stats.compile_seconds, 3),
            "compiled": facts["compiled"],
            "prepare_seconds": round(seconds, 3),
        }
    finally:
        way.close()
