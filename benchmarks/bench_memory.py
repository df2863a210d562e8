"""`bench memory`: what a bank of several buckets in one slot holds.

Against eager's peak in the largest bucket:

    peak_bytes          live tensors outside of pools, at most, and all that pools reserve
    reserved_bytes      all that the allocator has reserved, at most, beginning with an empty cache
    device_bytes        what the device has given away in the end: also graphs, which the allocator
                        knows nothing of

Parameters and gradients, which all ways share, are not counted.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch
from bench_models import (
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    shape,
    twin,
    zero_gradients,
)
from bench_step import CAPTURABLE, KILO, PART_HELP, Part, WorkArguments
from bench_ways import Graphed, Way
from step_figures import attempt_alone

from packgraph.bench.comparison import (
    Deadline,
    above,
    held_bytes,
    peak_bytes,
    room_for_code,
    start_anew,
)
from packgraph.bench.rows import Column, Row, Rows, gibibytes, value
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import Count, option

Attention = Annotated[str, ("auto", *CAPTURABLE)]
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


@dataclass(frozen=True, kw_only=True)
class BankArguments(WorkArguments):
    """Options of benchmarks that capture buckets."""

    usual_tokens: ClassVar[tuple[int, ...]] = (8 * KILO,)

    part: Part = option("model", PART_HELP)
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    attention: Attention = option("auto", "attention of all graphs")
    banks: tuple[Count, ...] = option((1, 8), "numbers of buckets", metavar="K ...")

    def bank(self, tokens: int, buckets: int, vocabulary: int) -> "Bank":
        """A bank of so many buckets in equal steps up to `tokens` tokens."""
        shapes = [
            Capacity(tokens * step // buckets, self.documents) for step in range(1, buckets + 1)
        ]
        drawn = [draw_batches(one, 1, vocabulary, **self.drawn)[0] for one in reversed(shapes)]
        return Bank(shapes, drawn)

    def built(self, device: torch.device) -> DecoderStack:
        """The model, with gradients."""
        config = shape(str(self.model), self.layers)
        model = build_part(self.part, config, device, dtype_on(device))
        zero_gradients([model])
        return twin(model, self.attention)


class Bank(NamedTuple):
    """shapes: ascending. drawn: a microbatch on the host for each, largest first."""

    shapes: list[Capacity]
    drawn: list[PackedBatch]

    def work(self, model: DecoderStack) -> TimedPart:
        """Forward and backward of its microbatches."""
        real = min(batch.num_tokens for batch in self.drawn)
        return TimedPart(model, self.shapes[-1].tokens, real)


@dataclass(frozen=True, kw_only=True)
class MemoryArguments(BankArguments):
    """Bytes of a bank of buckets in one slot, against eager's peak."""

    banks: tuple[Count, ...] = option((1, 4, 8), "numbers of buckets", metavar="K ...")
    compile: bool = option(False, "graphs of compiled code")


def bench_memory(
    options: MemoryArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """One row for eager and for each bank, at each number of tokens."""
    model = options.built(device)
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
    options: MemoryArguments, model: DecoderStack, device: torch.device, tokens: int, buckets: int
) -> Row:
    """Bytes of a bank (0 buckets: of eager calls). The first call's capacity is the largest."""
    bank = options.bank(tokens, max(1, buckets), model.config.vocab_size)
    batches, work = [batch.to(device) for batch in bank.drawn], bank.work(model)
    free_memory(device)
    before, reserved, free = held_bytes(device), _reserved(device), _free(device)
    way = (
        Graphed("chunk", work, bank.shapes, "chunk", options.compile)
        if buckets
        else Way("eager", work)
    )
    try:
        way.prepare(batches)
        free_memory(device)
        peak = peak_bytes(device, lambda: _run(way, batches))
        return {
            "peak_bytes": above(peak, before),
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
