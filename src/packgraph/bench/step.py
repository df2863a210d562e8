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
from collections.abc import Callable
from dataclasses import dataclass

import torch

from packgraph.bench.comparison import Check, Comparison, Sample, agreement, attempt_alone, groups
from packgraph.bench.models import (
    PEAK_TFLOPS,
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    model_flops,
    peak_share,
    refit,
    shape,
    squared_gradients,
    zero_gradients,
)
from packgraph.bench.moe_variants import expert_memory, give_rows, make_expert_way, measured_memory
from packgraph.bench.padding import bucket_request, planned_buckets
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, quantile, value
from packgraph.bench.timing import (
    Deadline,
    busy_time,
    held_bytes,
    peak_bytes,
    rounds_in_turn,
    start_anew,
    time_block,
    time_calls,
)
from packgraph.bench.variants import Setting, Way, room_for_code
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch

LEAST_ROUNDS = 3  # of ways that are ready when the time is up
BUSY_CALLS = 2

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


@dataclass(frozen=True)
class StepOptions:
    """What to measure. tokens: rows of the table. calls: microbatches in a block; mean, sigma: of
    document lengths.

    part: `model`, or its `layers` alone. documents: places in the capacity of ways that have one;
    None for the most that occur. buckets: at most so many for `auto`. attention: `own`, or the
    backend of all ways. together: ways that are measured side by side, None for all. compiler: of
    ways that compile. room: rows of experts that are not exactly what is routed, over that.
    """

    model: str
    layers: int | None
    tokens: tuple[int, ...]
    ways: tuple[str, ...]
    rounds: int
    calls: int
    mean: float = 1024.0
    sigma: float = 1.5
    seed: int = 0
    part: str = "model"
    documents: int | None = None
    buckets: int = 8
    attention: str = "own"
    together: int | None = None
    compiler: str = "inductor"
    room: float = 1.0


def bench_step(options: StepOptions, device: torch.device, rows: Rows, deadline: Deadline) -> None:
    """Measure everything in `options`; one row per number of tokens and way."""
    model = build_part(options.part, shape(options.model, options.layers), device, dtype_on(device))
    zero_gradients([model])
    give_rows(model, options.room)
    for tokens in options.tokens:
        bench = _StepBench(options, tokens, model, device, deadline)
        for number, names in enumerate(groups(options.ways, options.together)):
            contest = Comparison(names)
            try:
                with room_for_code():
                    bench.measure(contest)
            finally:  # what was measured before an interruption is a result, too
                for name in names[1:] if number else names:
                    rows.add(bench.row(contest, name))
            start_anew(device)


class _StepBench:
    """All ways at one number of tokens."""

    def __init__(
        self,
        options: StepOptions,
        tokens: int,
        model: DecoderStack,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        self.options, self.tokens, self.model = options, tokens, model
        self.device, self.deadline = device, deadline
        config = model.config
        attention = (
            model.attention_choice().name if options.attention == "own" else options.attention
        )
        buckets = planned_buckets(
            bucket_request(config, tokens, options.buckets, attention),
            options.documents,
            mean=options.mean,
            sigma=options.sigma,
            seed=options.seed,
        )
        self.draws = draw_batches(
            buckets[-1],
            options.rounds * options.calls + 1,
            config.vocab_size,
            mean=options.mean,
            sigma=options.sigma,
            seed=options.seed,
        )
        self.flops = [model_flops(config, batch.lengths, head=model.last) for batch in self.draws]
        real = min(batch.num_tokens for batch in self.draws)
        self.setting = Setting(
            TimedPart(model, tokens, real),
            model,
            buckets[-1],
            buckets,
            options.attention,
            options.compiler,
        )
        self.batches: dict[str, list[PackedBatch]] = {}

    def measure(self, contest: Comparison) -> None:
        """Prepare all ways, let them take turns, close them."""
        ways = dict[str, Way]()
        for name in contest.names:
            if self.deadline.passed():
                contest.drop(name, self.deadline.reason)
                continue
            self._prepare(contest, ways, name)
            if name in contest.reasons:
                self._close(contest, ways, name)
        runs = {
            name: lambda number, name=name: self._round(contest, ways[name], number)
            for name in ways
        }
        begun = iter(range(self.options.rounds))
        rounds_in_turn(
            runs,
            self.options.rounds,
            lambda: (
                next(begun) >= min(LEAST_ROUNDS, self.options.rounds) and self.deadline.passed()
            ),
        )
        for name in list(ways):
            contest.drop(name, ways[name].complaint())
            if name not in contest.reasons:
                contest.extras[name] |= self._busy(ways[name])
        for name in list(ways):
            contest.attempt(name, ways.pop(name).close)

    def row(self, contest: Comparison, name: str) -> Row:
        """The row of one way at this number of tokens."""
        options, batches = self.options, self.batches.get(name, self.draws)
        places = sum(batch.capacity.tokens for batch in batches)
        real = sum(batch.num_tokens for batch in batches)
        choice = self.setting.attention_of(name)
        what = {
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
            "mean": options.mean,
            "sigma": options.sigma,
            "seed": options.seed,
            "real_tokens": round(real / len(batches), 1),
            "documents_mean": round(statistics.mean(batch.num_documents for batch in batches), 2),
            "padding": round(1 - real / places, 5),
        }
        row = what | contest.row(name, "device_ms", 1e-2 if self.device.type == "cuda" else 1e-5)
        samples = contest.samples[name] if row["reason"] is None else []
        row["rounds"] = len(samples) // options.calls
        row["mfu"] = (
            round(
                statistics.median(
                    peak_share(sample.flops, sample.times["device_ms"]) for sample in samples
                ),
                5,
            )
            if samples and self.device.type == "cuda"
            else None
        )
        if self.model.config.experts.enabled:
            row |= (
                {"room": options.room}
                | measured_memory(row, contest.extras[contest.names[0]])
                | expert_memory(name, self.model, self.setting.capacity, options.room)
            )
        return row | {"mfu_peak_tflops": PEAK_TFLOPS}

    def _prepare(self, contest: Comparison, ways: dict[str, Way], name: str) -> None:
        """Make a way, capture, warm it up, check what it computes, measure its memory."""
        free_memory(self.device)
        before = held_bytes(self.device)

        def upload() -> None:
            ways[name] = make_expert_way(name, self.setting)
            self.batches[name] = [
                refit(batch, ways[name].capacity(batch)).to(self.device) for batch in self.draws
            ]

        def first_calls() -> float:
            return time_block(self.device, lambda: ways[name].prepare(self.batches[name]))[0]

        contest.attempt(name, upload)
        milliseconds = None if name in contest.reasons else contest.attempt(name, first_calls)
        if milliseconds is None:
            return
        contest.extras[name] = {"prepare_seconds": round(milliseconds / 1000, 3)} | ways[
            name
        ].facts()
        check = contest.attempt(name, lambda: self._check(ways[name]))
        if check is not None:
            contest.checks[name] = check
            free_memory(self.device)
            most = max(self.batches[name], key=lambda batch: (batch.capacity, batch.num_tokens))
            peak = contest.attempt(
                name, lambda: peak_bytes(self.device, lambda: ways[name].run(most))
            )
            contest.extras[name]["peak_bytes"] = (
                None if peak is None or before is None else peak - before
            )

    def _check(self, way: Way) -> Check:
        zero_gradients([self.model])
        score = self.setting.work.score(way.run(self.batches[way.name][0]))
        return Check(score, squared_gradients([self.model]) ** 0.5)

    def _round(self, contest: Comparison, way: Way, number: int) -> None:
        if way.name not in contest.reasons:
            contest.samples[way.name] += (
                contest.attempt(way.name, lambda: self._time(way, number)) or []
            )

    def _block(self, number: int) -> slice:
        """The microbatches of a round."""
        return slice(number * self.options.calls, (number + 1) * self.options.calls)

    def _time(self, way: Way, number: int) -> list[Sample]:
        batches, flops = (
            self.batches[way.name][self._block(number)],
            self.flops[self._block(number)],
        )
        zero_gradients([self.model])
        laps, host_ms = time_calls(
            self.device, lambda mark: _run(way, batches, mark), lambda: self._lead(way)
        )
        return [
            Sample({"device_ms": lap, "host_ms": host_ms / len(batches)}, batch.num_tokens, work)
            for lap, batch, work in zip(laps, batches, flops, strict=True)
        ]

    def _busy(self, way: Way) -> Row:
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

    def _lead(self, way: Way) -> None:
        """A call ahead of those that count, on a draw of its own."""
        _run(way, self.batches[way.name][-1:])

    def _close(self, contest: Comparison, ways: dict[str, Way], name: str) -> None:
        """Free a way that failed; those after it find the memory of the device as this one found
        it."""
        if name in ways:
            contest.attempt(name, ways.pop(name).close)
        free_memory(self.device)


def _run(way: Way, batches: list[PackedBatch], mark: Callable[[], None] = lambda: None) -> None:
    with way.frozen():
        for batch in batches:
            way.run(batch)
            mark()
