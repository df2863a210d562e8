"""`bench attention`: what places for documents that are not there cost the attention
kernels.

    tight       as many places as there are documents, and their own longest one          what eager code can have
    64, 256     so many places, and the longest document may fill the row                 what a graph has to have

The same documents in all shapes. On CUDA calls are captured and replayed many at a time, so that
kernels are measured and not the host that launches them, and what a graph costs is seen. tax: the
median over that of tight.
"""  # noqa: E501

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from bench_models import draw_batches, dtype_on, refit, shape
from bench_step import CAPTURABLE, KILO, WorkArguments
from others import record_on_cuda
from step_figures import attempt_alone, time_block

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Column, Row, Rows, figures, median, value
from packgraph.models.branches import head_sizes
from packgraph.models.config import DecoderConfig
from packgraph.ops.attention.api import attention, attention_metadata
from packgraph.ops.attention.flash import flash_problems
from packgraph.ops.attention.varlen import varlen_problems
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import Count, option

PLACES = ("tight", "64", "256")
REPEATS, REPLAYS = 10, 3

COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("backend", value("way")),
    ("places", value("places")),
    ("forward µs", median("forward_us", 1)),
    ("tax", value("forward_tax", ".2f")),
    ("backward µs", median("backward_us", 1)),
    ("tax", value("backward_tax", ".2f")),
]


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(WorkArguments):
    """The attention operation, by places for documents."""

    usual_tokens: ClassVar[tuple[int, ...]] = tuple(KILO * size for size in (1, 2, 4, 8, 16))

    ways: tuple[Annotated[str, CAPTURABLE], ...] = option(
        (), "backends (default: all that have kernels for this device)"
    )
    draws: Count = option(5, "microbatches", metavar="N")


def usual_backends(config: DecoderConfig, device: torch.device) -> tuple[str, ...]:
    """The backends that can run heads of this shape on the device, by their kernels; the masked one
    where none can."""
    found = [
        name
        for name, problems in (("flash", flash_problems), ("varlen", varlen_problems))
        if not problems(device, dtype_on(device), *head_sizes(config))
    ]
    return tuple(found) or ("sdpa",)


def bench_attention(
    options: AttentionArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for each number of tokens, backend and number of places."""
    config = shape(str(options.model))
    for tokens in options.tokens:
        draws = draw_batches(
            Capacity(tokens, min(64, tokens)),
            options.draws,
            config.vocab_size,
            **options.drawn,
        )
        for backend in options.ways or usual_backends(config, device):
            tight: Row | None = None
            for places in PLACES:
                times, reason = attempt_alone(
                    partial(_times, config, draws, backend, places, device), deadline
                )
                row: Row = {
                    "benchmark": "attention",
                    "way": backend,
                    "model": options.model,
                    "tokens": tokens,
                    "places": places,
                    "heads": [
                        config.num_heads,
                        config.num_kv_heads,
                        *dict.fromkeys(head_sizes(config)),
                    ],
                    "dtype": str(dtype_on(device)).removeprefix("torch."),
                    **options.drawn,
                    "documents_mean": round(
                        statistics.mean(batch.num_documents for batch in draws), 2
                    ),
                    "figures": {name: figures(found) for name, found in (times or {}).items()},
                    "reason": reason,
                }
                tight = tight or row["figures"]
                rows.add(row | _tax(row["figures"], tight))


def _tax(times: Row, tight: Row) -> Row:
    """How many times as long as with tight boundaries."""
    return {
        f"{part}_tax": round(times[f"{part}_us"]["median"] / tight[f"{part}_us"]["median"], 3)
        for part in ("forward", "backward")
        if times and tight
    }


def _times(
    config: DecoderConfig,
    draws: Sequence[PackedBatch],
    backend: str,
    places: str,
    device: torch.device,
) -> dict[str, list[float]]:
    """Microseconds of forward and backward, for each draw."""
    found: dict[str, list[float]] = {"forward_us": [], "backward_us": []}
    for batch in draws:
        capacity = (
            Capacity(batch.capacity.tokens, batch.num_documents, max(batch.lengths))
            if places == "tight"
            else Capacity(batch.capacity.tokens, int(places))
        )
        forward, backward = _one(config, refit(batch, capacity).to(device), backend)
        found["forward_us"].append(forward)
        found["backward_us"].append(backward)
    return found


def _one(config: DecoderConfig, batch: PackedBatch, backend: str) -> tuple[float, float]:
    device, tokens = batch.tokens.device, batch.capacity.tokens
    metadata = attention_metadata(batch, backend)
    of_keys, of_values = head_sizes(config)
    q, k, v, gradient = (
        torch.randn(tokens, heads, size, device=device, dtype=dtype_on(device))
        for heads, size in (
            (config.num_heads, of_keys),
            (config.num_kv_heads, of_keys),
            (config.num_kv_heads, of_values),
            (config.num_heads, of_values),
        )
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def forward() -> object:
        return [attention(q, k, v, metadata) for _ in range(REPEATS)]

    def both() -> object:
        out = attention(q, k, v, metadata)
        return [
            torch.autograd.grad(out, inputs, gradient, retain_graph=True) for _ in range(REPEATS)
        ]

    alone = kernel_time(device, forward) / REPEATS
    return alone, max(0.0, kernel_time(device, both) - alone) / REPEATS


def kernel_time(device: torch.device, run: Callable[[], object]) -> float:
    """Microseconds of what `run` launches: of a replay on CUDA, of a call on a CPU. The fastest of
    a few."""
    if device.type != "cuda":
        run()
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began)
    _, replay = record_on_cuda(run)
    return 1000 * min(time_block(device, replay)[0] for _ in range(REPLAYS))
