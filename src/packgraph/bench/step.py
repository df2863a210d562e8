"""`packgraph bench step`: forward and backward of one packed microbatch, by every way, at every number of tokens.

    block of a round    calls x (forward, backward), one after another as in gradient accumulation, then a wait
    all ways            the same microbatches in the same order, taking turns round by round

Times are per call. Peak memory is what a way holds beyond parameters and gradients, which all ways share.
"""
from dataclasses import dataclass, replace

import torch

from packgraph.bench.compiled import no_silent_eager
from packgraph.bench.contest import Check, Contest, Sample, agreement, groups
from packgraph.bench.models import (
    FreshModel,
    draw_batches,
    dtype_on,
    shape,
    squared_gradients,
    zero_gradients,
)
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, value
from packgraph.bench.timing import Deadline, free_unused, held_bytes, peak_bytes, rounds_in_turn, time_block
from packgraph.bench.ways import Way, make_way
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

WARM_UP_CALLS = 4
BLOCKS = 4  # different blocks of microbatches that the rounds go through

COLUMNS: list[Column] = [
    ("tokens", value("tokens")), ("way", value("way")), ("device ms", median("device_ms")),
    ("host ms", median("host_ms")), ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("ratio", value("ratio", ".2f")), ("rounds", value("rounds")), ("prepare s", value("prepare_seconds", ".1f")),
    ("capture s", value("capture_seconds", ".2f")), ("pool GiB", gibibytes("pool_bytes")),
    ("peak GiB", gibibytes("peak_bytes")), ("padding", value("padding", ".1%")), ("loss", agreement),
    ("note", lambda row: row["reason"] or "")]


@dataclass(frozen=True)
class StepOptions:
    """What to measure. tokens: rows of the table. calls: microbatches in a block; mean, sigma: of document lengths.

    attention: backend, or `auto` for the fastest that there is.
    """

    model: str
    layers: int | None
    tokens: tuple[int, ...]
    documents: int
    ways: tuple[str, ...]
    rounds: int
    calls: int
    mean: float
    sigma: float
    seed: int
    one_at_a_time: bool
    attention: str = "auto"


def bench_step(options: StepOptions, device: torch.device, rows: Rows, deadline: Deadline) -> None:
    """Measure everything in `options`; one row per number of tokens and way."""
    config = replace(shape(options.model, options.layers), attention_backend=options.attention)
    model = FreshModel(config, device=device, dtype=dtype_on(device))
    zero_gradients([model])
    for tokens in options.tokens:
        bench = _StepBench(options, Capacity(tokens, options.documents), model, device, deadline)
        for number, names in enumerate(groups(options.ways, options.one_at_a_time)):
            contest = bench.measure(names)
            for name in names[1:] if number else names:
                rows.add(bench.row(contest, name))
            torch.compiler.reset()
            free_unused(device)


class _StepBench:
    """All ways at one capacity."""

    def __init__(self, options: StepOptions, capacity: Capacity, model: FreshModel, device: torch.device,
                 deadline: Deadline) -> None:
        self.options, self.capacity, self.model = options, capacity, model
        self.device, self.deadline = device, deadline
        batches = draw_batches(capacity, BLOCKS * options.calls, model.config.vocab_size, mean=options.mean,
                               sigma=options.sigma, seed=options.seed)
        self.real_tokens = sum(batch.num_tokens for batch in batches) / len(batches)
        uploaded = [batch.to(device) for batch in batches]
        self.blocks = [uploaded[start : start + options.calls] for start in range(0, len(uploaded), options.calls)]

    def measure(self, names: list[str]) -> Contest:
        """Prepare all ways, let them take turns, close them."""
        contest, ways = Contest(names), dict[str, Way]()
        for name in names:
            if self.deadline.passed():
                contest.drop(name, self.deadline.reason)
                continue
            self._prepare(contest, ways, name)
            if name in contest.reasons:
                self._close(contest, ways, name)
        runs = {name: lambda number, name=name: self._round(contest, ways[name], number) for name in ways}
        rounds_in_turn(runs, self.options.rounds, self.deadline.passed)
        for name in list(ways):
            contest.drop(name, ways[name].complaint())
            if not contest.samples[name] and self.deadline.passed():
                contest.drop(name, self.deadline.reason)
            self._close(contest, ways, name)
        return contest

    def row(self, contest: Contest, name: str) -> Row:
        """The row of one way at this capacity."""
        options, config = self.options, self.model.config
        what = {"benchmark": "step", "way": name, "model": options.model, "layers": config.num_layers,
                "dtype": str(dtype_on(self.device)).removeprefix("torch."), "tokens": self.capacity.tokens,
                "documents": self.capacity.documents, "attention": str(self.model.attention_choice()),
                "calls": options.calls, "mean": options.mean,
                "sigma": options.sigma, "seed": options.seed, "real_tokens": round(self.real_tokens, 1),
                "padding": round(1 - self.real_tokens / self.capacity.tokens, 5)}
        return what | contest.row(name, "device_ms", 1e-2 if self.device.type == "cuda" else 1e-5)

    def _prepare(self, contest: Contest, ways: dict[str, Way], name: str) -> None:
        """Make a way, warm it up, check what it computes, measure its memory."""
        free_unused(self.device)
        before = held_bytes(self.device)

        def first_calls() -> float:
            ways[name] = make_way(name, self.model, self.capacity)
            with no_silent_eager():
                return time_block(self.device, lambda: [ways[name].run(batch) for batch in self._some()])[1]

        milliseconds = contest.attempt(name, first_calls)
        if milliseconds is None:
            return
        contest.extras[name] = {"prepare_seconds": round(milliseconds / 1000, 3)} | ways[name].facts()
        check = contest.attempt(name, lambda: self._check(ways[name]))
        if check is not None:
            contest.checks[name] = check
            free_unused(self.device)
            peak = contest.attempt(name, lambda: peak_bytes(self.device, lambda: ways[name].run(self.blocks[0][0])))
            contest.extras[name]["peak_bytes"] = None if peak is None or before is None else peak - before

    def _some(self) -> list[PackedBatch]:
        """A few microbatches of several blocks."""
        every = [batch for block in self.blocks for batch in block]
        return [every[number % len(every)] for number in range(WARM_UP_CALLS)]

    def _check(self, way: Way) -> Check:
        zero_gradients([self.model])
        loss = float(way.run(self.blocks[0][0]))
        return Check(loss, squared_gradients([self.model]) ** 0.5)

    def _round(self, contest: Contest, way: Way, number: int) -> None:
        if way.name not in contest.reasons:
            sample = contest.attempt(way.name, lambda: self._time(way, number))
            if sample is not None:
                contest.samples[way.name].append(sample)

    def _time(self, way: Way, number: int) -> Sample:
        block = self.blocks[number % len(self.blocks)]
        zero_gradients([self.model])
        device_ms, host_ms = time_block(self.device, lambda: [way.run(batch) for batch in block])
        calls = len(block)
        return Sample({"device_ms": device_ms / calls, "host_ms": host_ms / calls},
                      sum(batch.num_tokens for batch in block) / calls)

    def _close(self, contest: Contest, ways: dict[str, Way], name: str) -> None:
        """Free a way; the ways after it find the memory of the device as this one found it."""
        if name in ways:
            contest.attempt(name, ways.pop(name).close)
        free_unused(self.device)
