"""`packgraph bench step`: forward and backward of one packed microbatch, by every way, at every
number of tokens.

    block of a round    one call ahead, then calls x (forward, backward) as in gradient
                        accumulation, then a wait
    all ways            the same documents in the same order, taking turns round by round; a new
                        draw in every call

Times are per call: on the device from the end of one call to the end of the next, on the host the
mean of the block. The call ahead is not counted: a step of training begins while the device works
on the one before, so what the host does once a step costs time only where the host is what
everything waits for. Peak memory is what a way holds beyond parameters and gradients, which all
ways share. gpu_busy is measured after all rounds, see bench/timing.py; mfu counts the operations
that the model asks for, see bench/models.py.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, ClassVar

import torch

from packgraph.bench.comparison import Check, Comparison, Sample, agreement, attempt_alone
from packgraph.bench.models import (
    PEAK_TFLOPS,
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    model_flops,
    peak_share,
    planned_buckets,
    refit,
    shape,
    squared_gradients,
    zero_gradients,
)
from packgraph.bench.moe_variants import (
    EXPERT_WAYS,
    MOE_WAYS,
    expert_memory,
    give_rows,
    measured_memory,
)
from packgraph.bench.options import (
    CAPTURABLE,
    FIRST,
    KILO,
    PART_HELP,
    ComparedArguments,
    Part,
)
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, quantile, value
from packgraph.bench.timing import Deadline, busy_time, time_calls
from packgraph.bench.variants import FLOAT8_WAYS, WAYS, Maker, Setting, Way
from packgraph.models.stack import DecoderStack
from packgraph.ops.float8.linear import is_float8
from packgraph.packing.batch import PackedBatch
from packgraph.train.config.values import Count, option

BUSY_CALLS = 2
ALL_WAYS: Mapping[str, Maker] = MappingProxyType({**WAYS, **FLOAT8_WAYS, **EXPERT_WAYS})
StepWay = Annotated[str, tuple(ALL_WAYS)]

COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("attention", value("attention")),
    ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("p99", quantile("ms_per_1000_tokens", "p99", 3)),
    ("ratio", value("ratio", ".2f")),
    ("device ms", median("device_ms")),
    ("host ms", median("host_ms")),
    ("busy", value("gpu_busy", ".1%")),
    ("mfu", value("mfu", ".3f")),
    ("prepare s", value("prepare_seconds", ".1f")),
    (
        "capture ms / layer",
        lambda row: (
            "-"
            if row.get("capture_layer_seconds") is None
            else f"{1000 * row['capture_layer_seconds']:.1f}"
        ),
    ),
    ("peak GiB", gibibytes("peak_bytes")),
    ("padding", value("padding", ".1%")),
    ("result", agreement),
]


@dataclass(frozen=True, kw_only=True)
class StepArguments(ComparedArguments):
    """Forward and backward of one microbatch."""

    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 2 * KILO, 4 * KILO)
    makers: ClassVar[Mapping[str, Maker]] = ALL_WAYS
    compiler: ClassVar[str] = "inductor"
    room: ClassVar[float] = 1.0

    part: Part = option("model", PART_HELP)
    ways: tuple[StepWay, ...] = option(tuple(WAYS), FIRST)
    documents: Count | None = option(
        None,
        "places for documents of ways that have one shape (default: the most that occur)",
        metavar="N",
    )
    calls: Count = option(4, "microbatches in a row without a wait", metavar="N")
    buckets: Count = option(8, "of the ways auto, at most", metavar="K")
    attention: Annotated[str, ("own", *CAPTURABLE)] = option(
        "own", "attention of every way; own = what each way's stack has; rows say which"
    )


@dataclass(frozen=True, kw_only=True)
class MoeArguments(StepArguments):
    """Variant of step with defaults and ways for layers with experts."""

    usual_models: ClassVar[tuple[str, str]] = ("moonlight", "moonlight-tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 4 * KILO, 16 * KILO)

    part: Part = option("layers", PART_HELP)
    ways: tuple[StepWay, ...] = option(MOE_WAYS, FIRST)
    room: float = option(  # type: ignore[misc]
        1.0,
        "rows that experts of static shapes have, over those that are routed: what a rank of "
        "several needs for an uneven load",
        metavar="F",
    )

    def problems(self) -> list[str]:
        """Returns what is wrong with further options."""
        small = [] if self.room >= 1 else [f"--room must be at least 1, got {self.room:g}"]
        return super().problems() + small


def bench_step(
    options: StepArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """Measure everything in `options`; one row per number of tokens and way."""
    config = shape(str(options.model), options.layers)
    model = build_part(options.part, config, device, dtype_on(device))
    zero_gradients([model])
    give_rows(model, options.room)
    for tokens in options.tokens:
        StepComparison(options, tokens, model, device, deadline).measure(rows, options.together)


class StepComparison(Comparison[Way]):
    """All ways at one number of tokens."""

    main, least_rounds = "device_ms", 3

    def __init__(
        self,
        options: StepArguments,
        tokens: int,
        model: DecoderStack,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        super().__init__(options.ways, options.rounds, device, deadline)
        self.options, self.tokens, self.model = options, tokens, model
        config, attention = model.config, options.attention
        backend = model.attention_choice().name if attention == "own" else attention
        buckets = planned_buckets(
            config, tokens, options.buckets, backend, options.documents, **options.drawn
        )
        self.draws = draw_batches(
            buckets[-1], options.rounds * options.calls + 1, config.vocab_size, **options.drawn
        )
        self.flops = [model_flops(config, batch.lengths, head=model.last) for batch in self.draws]
        work = TimedPart(model, tokens, min(batch.num_tokens for batch in self.draws))
        self.setting = Setting(work, model, buckets[-1], buckets, attention, options.compiler)
        self.batches: dict[str, list[PackedBatch]] = {}

    def make(self, name: str) -> Way:
        """The way called `name`, and the microbatches in its shapes."""
        way = self.options.makers[name](name, self.setting)
        self.batches[name] = [
            refit(batch, way.capacity(batch)).to(self.device) for batch in self.draws
        ]
        return way

    def warm_up(self, way: Way) -> None:
        """Capture, compile and run the first microbatches."""
        way.prepare(self.batches[way.name])

    def check(self, way: Way) -> Check:
        """Computes the figures of a way on the first microbatch."""
        zero_gradients([self.model])
        score = self.setting.work.score(way.run(self.batches[way.name][0]))
        return Check(score, squared_gradients([self.model]) ** 0.5)

    def heaviest(self, way: Way) -> object:
        """Run the largest microbatch."""
        most = max(self.batches[way.name], key=lambda batch: (batch.capacity, batch.num_tokens))
        return way.run(most)

    def time(self, way: Way, number: int) -> list[Sample]:
        """The microbatches of a round, in a row."""
        block = self._block(number)
        batches, flops = self.batches[way.name][block], self.flops[block]
        zero_gradients([self.model])
        laps, host_ms = time_calls(
            self.device, lambda mark: _run(way, batches, mark), lambda: self._lead(way)
        )
        return [
            Sample({"device_ms": lap, "host_ms": host_ms / len(batches)}, batch.num_tokens, work)
            for lap, batch, work in zip(laps, batches, flops, strict=True)
        ]

    def after(self, way: Way) -> Row:
        """Share of the time in which the device is at work, kernels of a call; or why they are not
        known."""
        batches = self.batches[way.name][self._block(0)][:BUSY_CALLS]
        busy, reason = attempt_alone(
            lambda: busy_time(self.device, lambda: _run(way, batches), lambda: self._lead(way)),
            self.deadline,
        )
        return {
            "gpu_busy": None if busy is None else round(busy.share, 4),
            "gpu_busy_reason": reason,
            "kernel_ms": None if busy is None else round(busy.kernel_ms / len(batches), 4),
        }

    def what(self, name: str) -> Row:
        """Shapes, lengths and attention of a way."""
        options, batches = self.options, self.batches.get(name, self.draws)
        real = sum(batch.num_tokens for batch in batches)
        choice = self.setting.attention_of(name)
        return {
            "benchmark": "step",
            "part": options.part,
            "way": name,
            "model": options.model,
            "layers": self.model.config.num_layers,
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "tokens": self.tokens,
            "documents": self.setting.capacity.documents,
            "attention": self.model.attention_choice().name if choice == "auto" else choice,
            "attention_asked": options.attention,
            "calls": options.calls,
            **options.drawn,
            "real_tokens": round(real / len(batches), 1),
            "documents_mean": round(statistics.mean(batch.num_documents for batch in batches), 2),
            "padding": round(1 - real / sum(batch.capacity.tokens for batch in batches), 5),
        }

    def row(self, name: str) -> Row:
        """The row of one way at this number of tokens."""
        row, options = super().row(name), self.options
        samples = self.results.samples[name] if row["reason"] is None else []
        row["rounds"] = len(samples) // options.calls
        shares = [peak_share(sample.flops, sample.times["device_ms"]) for sample in samples]
        known = shares and self.device.type == "cuda"
        row["mfu"] = round(statistics.median(shares), 5) if known else None
        if self.model.config.experts.enabled:
            row["room"] = options.room
            row |= measured_memory(row, self.results.extras[self.results.names[0]])
            row |= expert_memory(name, self.model, self.setting.capacity, options.room)
        return row | {"mfu_peak_tflops": PEAK_TFLOPS}

    def tolerance(self, name: str) -> float:
        """Largest relative difference of the losses of a way that is rounding; in float8, of
        numbers with four bits."""
        return 1e-2 if any(map(is_float8, name.split("+"))) else super().tolerance(name)

    def _block(self, number: int) -> slice:
        """The microbatches of a round."""
        return slice(number * self.options.calls, (number + 1) * self.options.calls)

    def _lead(self, way: Way) -> None:
        """A call ahead of those that count, on a draw of its own."""
        _run(way, self.batches[way.name][-1:])


def _run(way: Way, batches: list[PackedBatch], mark: Callable[[], None] = lambda: None) -> None:
    with way.frozen():
        for batch in batches:
            way.run(batch)
            mark()
