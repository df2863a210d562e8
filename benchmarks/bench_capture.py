"""`bench capture`: how long the graphs of a bank of buckets take to capture, per layer and bucket.

capture_seconds is what `build` takes for a declared bank after a first step in every shape: dry
run, capture of forward and backward, instantiation. Compiling comes before it and is told apart
(compile_seconds). prepare_seconds is all together, to the end of the first replays: how long
training stands still once.
"""

import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from bench_memory import BankArguments
from bench_step import per_layer_text
from bench_ways import Graphed
from step_figures import attempt_alone

from packgraph.bench.comparison import Deadline, room_for_code, start_anew
from packgraph.bench.rows import Column, Row, Rows, value
from packgraph.graphs.backend import synchronize
from packgraph.models.stack import DecoderStack
from packgraph.train.config.reading import option

CAPTURE_WAYS = ("layer", "chunk", "layer+compile", "chunk+compile")
COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("buckets", value("buckets")),
    ("capture s", value("capture_seconds", ".2f")),
    ("ms / layer and bucket", per_layer_text),
    ("compile s", value("compile_seconds", ".1f")),
    ("prepare s", value("prepare_seconds", ".1f")),
]


@dataclass(frozen=True, kw_only=True)
class CaptureArguments(BankArguments):
    """Seconds of capturing a bank of buckets."""

    ways: tuple[Annotated[str, CAPTURE_WAYS], ...] = option(CAPTURE_WAYS, "what is captured")


def bench_capture(
    options: CaptureArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for each number of tokens, bank and way."""
    model = options.built(device)
    for tokens, name, buckets in itertools.product(options.tokens, options.ways, options.banks):
        with room_for_code():
            found, reason = attempt_alone(
                partial(_measure_capture, options, model, device, name, tokens, buckets), deadline
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


def _measure_capture(
    options: CaptureArguments,
    model: DecoderStack,
    device: torch.device,
    name: str,
    tokens: int,
    buckets: int,
) -> Row:
    granularity, _, compiled = name.partition("+")
    bank = options.bank(tokens, buckets, model.config.vocab_size)
    batches = [batch.to(device) for batch in bank.drawn]
    synchronize(device)
    began = time.perf_counter()
    compile = "inductor" if compiled else False
    way = Graphed(name, bank.work(model), bank.shapes, granularity, compile)
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
