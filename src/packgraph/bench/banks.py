"""`packgraph bench memory` and `packgraph bench capture`: what a bank of several buckets in one
slot holds, and how long its graphs take to capture.

`bench memory`, against eager's peak in the largest bucket:

    peak_bytes       live tensors outside of pools, at most, and all that pools reserve
    reserved_bytes   all that the allocator has reserved, at most, beginning with an empty cache
    device_bytes     what the device has given away in the end: also graphs, which the allocator
                     knows nothing of

Parameters and gradients, which all ways share, are not counted.

`bench capture`, per layer and bucket:

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

from packgraph.bench.comparison import attempt_alone
from packgraph.bench.models import (
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    shape,
    twin,
    zero_gradients,
)
from packgraph.bench.rows import Column, Row, Rows, gibibytes, value
from packgraph.bench.timing import Deadline, held_bytes, peak_bytes, start_anew, synchronize
from packgraph.bench.variants import Graphed, Way, room_for_code
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

MEMORY_COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("peak GiB", gibibytes("peak_bytes")),
    ("of eager", value("peak_ratio", ".3f")),
    ("reserved GiB", gibibytes("reserved_bytes")),
    ("of eager", value("reserved_ratio", ".3f")),
    ("device GiB", gibibytes("device_bytes")),
    ("of eager", value("device_ratio", ".3f")),
    ("pool GiB", gibibytes("pool_bytes")),
]
CAPTURE_WAYS = ("layer", "chunk", "layer+compile", "chunk+compile")
CAPTURE_COLUMNS: list[Column] = [
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


def bank_shapes(tokens: int, documents: int, buckets: int) -> tuple[Capacity, ...]:
    """`buckets` capacities in equal steps up to `tokens` tokens, ascending."""
    return tuple(Capacity(tokens * step // buckets, documents) for step in range(1, buckets + 1))


def one_each(
    shapes: tuple[Capacity, ...], vocabulary: int, *, mean: float, sigma: float, seed: int
) -> list[PackedBatch]:
    """A microbatch for each shape, largest first."""
    return [
        draw_batches(capacity, 1, vocabulary, mean=mean, sigma=sigma, seed=seed)[0]
        for capacity in reversed(shapes)
    ]


@dataclass(frozen=True)
class MemoryOptions:
    """What to measure. tokens: of the largest bucket. banks: numbers of buckets. compile: whether
    graphs hold compiled code (a compiler's name, or False)."""

    model: str
    layers: int | None
    part: str
    tokens: tuple[int, ...]
    documents: int = 64
    banks: tuple[int, ...] = (1, 4, 8)
    compile: bool | str = False
    attention: str = "auto"
    mean: float = 1024.0
    sigma: float = 1.5
    seed: int = 0


def bench_memory(
    options: MemoryOptions, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for eager and for each bank, at each number of tokens."""
    model = build_part(options.part, shape(options.model, options.layers), device, dtype_on(device))
    zero_gradients([model])
    model = twin(model, options.attention)
    for tokens in options.tokens:
        eager: Row | None = None
        for buckets in (0, *options.banks):
            with room_for_code():
                found, reason = attempt_alone(
                    partial(_measure, options, model, device, tokens, buckets), deadline
                )
            free_memory(device)
            eager = eager or found
            rows.add(
                {
                    "benchmark": "memory",
                    "way": _name(buckets),
                    "part": options.part,
                    "model": options.model,
                    "layers": model.config.num_layers,
                    "tokens": tokens,
                    "documents": options.documents,
                    "buckets": buckets,
                    "compile": bool(options.compile) and buckets > 0,
                    "attention": model.attention_choice().name,
                    "reason": reason,
                }
                | (found or {})
                | _ratios(found, eager)
            )
        start_anew(device)


def _name(buckets: int) -> str:
    return f"{buckets} bucket{'s' if buckets > 1 else ''}" if buckets else "eager"


def _ratios(found: Row | None, eager: Row | None) -> Row:
    """How much more than eager, for everything that both have."""
    if found is None or eager is None:
        return {}
    return {
        f"{kind}_ratio": round(found[f"{kind}_bytes"] / eager[f"{kind}_bytes"], 4)
        for kind in ("peak", "reserved", "device")
        if found[f"{kind}_bytes"] and eager[f"{kind}_bytes"]
    }


def _measure(
    options: MemoryOptions, model: DecoderStack, device: torch.device, tokens: int, buckets: int
) -> Row:
    """Bytes of a bank (0 buckets: of eager calls). The first call's capacity is the largest."""
    shapes = bank_shapes(tokens, options.documents, max(1, buckets))
    drawn = one_each(
        shapes, model.config.vocab_size, mean=options.mean, sigma=options.sigma, seed=options.seed
    )
    batches = [batch.to(device) for batch in drawn]
    work = TimedPart(model, tokens, real=min(batch.num_tokens for batch in drawn))
    free_memory(device)
    before, reserved, free = held_bytes(device), _reserved(device), _free(device)
    way = (
        Graphed("chunk", work, shapes, "chunk", options.compile) if buckets else Way("eager", work)
    )
    try:
        way.prepare(batches)
        free_memory(device)
        peak = peak_bytes(device, lambda: _run(way, batches))
        return {
            "peak_bytes": None if peak is None or before is None else peak - before,
            "reserved_bytes": None
            if reserved is None
            else torch.cuda.max_memory_reserved(device) - reserved,
            "device_bytes": None if free is None else free - (_free(device) or 0),
            "pool_bytes": way.facts()["pool_bytes"],
            "capture_seconds": way.facts()["capture_seconds"],
        }
    finally:
        way.close()


def _run(way: Way, batches: list[PackedBatch]) -> None:
    for batch in batches:
        way.run(batch)


def _reserved(device: torch.device) -> int | None:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def _free(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


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
