"""`packgraph bench memory`: what a bank of several buckets in one slot holds, against eager's peak
in the largest.

    peak_bytes       live tensors outside of pools, at most, and all that pools reserve
    reserved_bytes   all that the allocator has reserved, at most, beginning with an empty cache
    device_bytes     what the device has given away in the end: also graphs, which the allocator
                     knows nothing of

Parameters and gradients, which all ways share, are not counted.
"""

from dataclasses import dataclass
from functools import partial

import torch

from packgraph.bench.bank import bank_shapes, one_each
from packgraph.bench.comparison import attempt_alone
from packgraph.bench.models import dtype_on, shape, zero_gradients
from packgraph.bench.parts import TimedPart, build_part, twin
from packgraph.bench.rows import Column, Row, Rows, gibibytes, value
from packgraph.bench.timing import Deadline, held_bytes, peak_bytes, start_anew
from packgraph.bench.variants import Graphed, Way, room_for_code
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch

COLUMNS: list[Column] = [
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
