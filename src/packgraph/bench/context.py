"""`packgraph bench context`: training steps whose rows are spread over one number of ranks, or over
what they need.

    ways    fixed  dynamic  fixed+graph  dynamic+graph  and the latter with compiled stages
    step    zeroed gradients, all microbatches, sums over ranks, AdamW: the slowest rank, from a
            common start

Shape and lengths are those of the public workload for dynamic context parallelism (Megatron-Core's
README: 12 layers, hidden size 2048, 8 microbatches, lognormal lengths of mean 1024 and sigma 1.5 up
to 8192, 2048 tokens a rank). Plans are made beforehand; their time is in the rows. Costs are
measured before planning, of rows by graphs where a way has any, so that balance is told in this
machine's time; the bank that they were measured with is the one that is timed.

Preparing takes most of a call, compiling most of that: ways with compiled code (a code for each
bucket) are left out unless they are asked for, and none is prepared any more when most of the time
is up, so that the others are timed.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from packgraph.bench.comparison import BenchRanks, Check, Comparison, Sample, agreement
from packgraph.bench.context_steps import (
    DYNAMIC,
    FIXED,
    ContextWay,
    PlannedStep,
    plan_steps,
    row_timer,
)
from packgraph.bench.models import FreshModel, dtype_on, shape
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, value
from packgraph.bench.timing import (
    Deadline,
    held_bytes,
    peak_bytes,
    rounds_in_turn,
    start_anew,
    synchronize,
)
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.decoder import DecoderConfig
from packgraph.ops.attention.kind import ContextWish
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import ContextCost, ContextRequest
from packgraph.parallel.context.rows import context_problems, spread_context
from packgraph.parallel.mesh import Layout, Mesh, context_sizes
from packgraph.parallel.processes import Launch, processes
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import OptimizerConfig
from packgraph.train.plan_context import context_cost
from packgraph.train.row_timing import measured_cost
from packgraph.train.runner import sample_batch
from packgraph.train.step import MicrobatchAssignment

KIND: ContextWish = "ulysses"  # how ranks share attention
STEPS = 6  # different ones that the rounds go through
PREPARING = 0.7  # of a limit in time, after which nothing else is prepared
COLUMNS: list[Column] = [
    ("way", value("way")),
    ("ranks", value("ranks")),
    ("ms / step", median("step_ms")),
    ("p90", lambda row: format(row["figures"]["step_ms"]["p90"], ".2f") if row["figures"] else "-"),
    ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("ratio", value("ratio", ".2f")),
    ("to dynamic", value("ratio_to_dynamic", ".2f")),
    ("rounds", value("rounds")),
    ("host ms", median("host_ms")),
    ("balance", value("balance", ".1%")),
    ("predicted ms", value("predicted_ms", ".1f")),
    ("plan ms", value("plan_ms", ".1f")),
    ("most pool GiB", gibibytes("pool_bytes")),
    ("to largest", value("pool_ratio", ".3f")),
    ("most peak GiB", gibibytes("peak_bytes")),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("loss", agreement),
]


@dataclass(frozen=True)
class ContextBenchOptions:
    """What to measure. ranks: all processes; fixed: ranks of every row of the fixed ways; tokens:
    of a rank; places: for documents in a row; longest: document; granularity: layer or chunk; the
    rest as in StepOptions."""

    model: str
    layers: int | None
    tokens: tuple[int, ...]
    places: tuple[int, ...]
    ways: tuple[str, ...]
    rounds: int
    mean: float
    sigma: float
    seed: int
    ranks: int
    fixed: int
    microbatches: int
    longest: int
    granularity: str = "chunk"

    @property
    def config(self) -> DecoderConfig:
        """The model."""
        return shape(self.model, self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Legal sizes of groups."""
        return tuple(sorted({*context_sizes(self.ranks), self.fixed}))

    def problems(self) -> list[str]:
        """Why these options describe no benchmark."""
        found = context_problems(self.config, self.ranks, wish=KIND)
        if self.ranks % self.fixed:
            found.append(
                f"--fixed {self.fixed}: groups of that size do not cover the {self.ranks} ranks"
            )
        found += [
            f"a document of {self.longest} tokens does not fit {self.fixed} ranks with {tokens} "
            "tokens each: "
            "lower --longest, or raise --tokens or --fixed"
            for tokens in self.tokens
            if self.longest > self.fixed * tokens
        ]
        return found


def bench_context(
    options: ContextBenchOptions,
    device: torch.device,
    launch: Launch,
    rows: Rows,
    deadline: Deadline,
) -> None:
    """Connect the processes of `launch` and measure. Raises on every rank's own errors after
    writing what there is."""
    layout = Layout(dp=1, cp=options.ranks, contexts=options.sizes)
    with processes(layout, device, launch) as mesh:
        measure_context(options, device, mesh, rows, deadline)


def measure_context(
    options: ContextBenchOptions, device: torch.device, mesh: Mesh, rows: Rows, deadline: Deadline
) -> None:
    """Measure everything in `options`; one row per number of tokens and way. Collective."""
    company = BenchRanks()
    for tokens in options.tokens:
        _ContextBench(options, tokens, device, mesh, company, deadline).measure(rows)
        start_anew(device)


class _ContextBench:
    """All ways at one number of tokens per rank, on this rank."""

    def __init__(
        self,
        options: ContextBenchOptions,
        tokens: int,
        device: torch.device,
        mesh: Mesh,
        company: BenchRanks,
        deadline: Deadline,
    ) -> None:
        self.options, self.tokens, self.device, self.mesh = options, tokens, device, mesh
        self.company, self.deadline = company, deadline
        self.model = FreshModel(options.config, device=device, dtype=dtype_on(device)).train()
        spread_context(self.model, mesh, tokens, KIND)
        self.optimizer = Optimizer(self.model.named_parameters(), OptimizerConfig(), mesh)
        self.sharing = MicrobatchAssignment.of(mesh, tokens)
        self.steps: list[PlannedStep] = []
        self.cost: ContextCost | None = None
        self.cost_note = ""
        self.cost_seconds = 0.0  # that building a bank and timing rows of it took
        self.plan_ms = 0.0  # median of the slowest rank
        self.ready: dict[
            str, tuple[ContextWay, int | None, float]
        ] = {}  # with bytes before it, seconds of its build

    def buckets(self, kind: str) -> list[Capacity]:
        """The rows that plans of a kind of way may have, smallest first."""
        sizes = (self.options.fixed,) if kind == FIXED else self.options.sizes
        return sorted(
            Capacity(size * self.tokens, places) for size in sizes for places in self.options.places
        )

    def measure(self, rows: Rows) -> None:
        """Prepare all ways, let them take turns, close them; write their rows."""
        contest, ways, doing = (
            Comparison(self.options.ways),
            dict[str, ContextWay](),
            [self.options.ways[0]],
        )
        try:
            with self.company.leaving(contest, doing, rows):
                self._measure(contest, ways, doing)
        finally:
            for name in contest.names:
                rows.add(self._row(contest, name))

    def _measure(self, contest: Comparison, ways: dict[str, ContextWay], doing: list[str]) -> None:
        self._plan(doing)
        for name in contest.names:
            doing[0] = name
            if self._late(PREPARING):
                contest.drop(
                    name,
                    f"not prepared: {PREPARING:.0%} of the {self.deadline.seconds:g} seconds had "
                    "passed, and the rest is for timing what is ready: more --seconds, fewer "
                    "--ways",
                )
                continue
            self._prepare(contest, ways, name)
        for way, *_ in self.ready.values():
            way.close()

        def run(name: str, number: int) -> None:
            doing[0] = name
            contest.samples[name].append(self._time(ways[name], number))

        runs = {name: lambda number, name=name: run(name, number) for name in ways}
        rounds_in_turn(runs, self.options.rounds, self._late)
        for name, way in ways.items():
            contest.drop(name, self.company.first_reason(way.complaint()))
            if not contest.samples[name]:
                contest.drop(name, self.deadline.reason)
        for way in ways.values():
            way.close()
        self._largest_alone(contest)

    def _late(self, share: float = 1.0) -> bool:
        """Whether that share of the time is up on any rank. Collective."""
        return any(self.company.gather(self.deadline.passed(share)))

    def _way(self, name: str, buckets: Sequence[Capacity]) -> ContextWay:
        return ContextWay(
            name,
            self.model,
            self.optimizer,
            buckets,
            self.mesh,
            self.device,
            self.options.granularity,
        )

    def _plan(self, doing: list[str]) -> None:
        """Measure what rows cost, and plan all steps by it. Collective."""
        options, names, began = self.options, self.options.ways, time.monotonic()
        doing[0] = next((name for name in names if "graph" in name), names[0])
        buckets, flash = self.buckets(DYNAMIC), self.model.attention_choice().name == "flash"
        prior = context_cost(options.config, 1, FLASH4 if flash else CostModel())
        before = held_bytes(self.device)
        way = self._way("dynamic+graph" if "graph" in doing[0] else DYNAMIC, buckets)
        reason = self.company.first_reason(
            way.build([sample_batch(bucket) for bucket in buckets[::-1]])
        )
        if reason is not None:
            raise RuntimeError(f"what rows cost cannot be measured: {reason}")
        built = time.monotonic() - began
        request = ContextRequest(
            world=options.ranks,
            tokens=self.tokens,
            sizes=options.sizes,
            places=options.places,
            waves=options.microbatches,
            cost=prior,
        )
        found = measured_cost(
            request, options.config.vocab_size, row_timer(way, self.company, self.device)
        )
        if found.cost is None:
            raise RuntimeError(found.note)
        self.cost, self.cost_note, request = (
            found.cost,
            found.note,
            replace(request, cost=found.cost),
        )
        if way.name in names:
            self.ready[way.name] = way, before, built
        else:
            way.close()
        free_memory(self.device)
        self.cost_seconds = round(max(self.company.gather(time.monotonic() - began)), 3)
        self.steps = plan_steps(
            STEPS,
            request,
            options.fixed,
            options.config.vocab_size,
            longest=options.longest,
            mean=options.mean,
            sigma=options.sigma,
            seed=options.seed,
        )
        self.plan_ms = max(
            self.company.gather(statistics.median(step.plan_ms for step in self.steps))
        )

    def _prepare(self, contest: Comparison, ways: dict[str, ContextWay], name: str) -> None:
        """Make a way, warm it up, capture, check what it computes, measure its memory.
        Collective."""
        free_memory(self.device)
        began, spent = time.monotonic(), 0.0
        if name in self.ready:
            way, before, spent = self.ready.pop(name)
        else:
            before, way = (
                held_bytes(self.device),
                self._way(name, self.buckets(name.partition("+")[0])),
            )
            reason = self.company.first_reason(way.build(self._share(way, self.steps[-1])))
            if reason is not None:
                contest.drop(name, reason)
                way.close()
                return
        ways[name] = way
        self._run(way, self.steps[-1])
        synchronize(self.device)
        prepared = round(max(self.company.gather(spent + time.monotonic() - began)), 3)
        loss, norm = self._run(way, self.steps[0])
        contest.checks[name] = Check(sum(self.company.gather(float(loss))), float(norm))
        peak = peak_bytes(self.device, lambda: self._run(way, self.steps[0]))
        facts = way.facts() | {
            "peak_bytes": None if peak is None or before is None else peak - before
        }
        every = self.company.gather(facts)
        lists: dict[str, list[Any]] = {key: [other[key] for other in every] for key in facts}
        contest.extras[name] = {"prepare_seconds": prepared} | {
            key: None if all(part is None for part in parts) else parts
            for key, parts in lists.items()
        }

    def _share(self, way: ContextWay, step: PlannedStep) -> list[Any]:
        return self.sharing.share(step.packs[way.groups])

    def _run(self, way: ContextWay, step: PlannedStep) -> tuple[torch.Tensor, torch.Tensor]:
        return way.step(self._share(way, step), step.loss_tokens)

    def _time(self, way: ContextWay, number: int) -> Sample:
        step = self.steps[number % len(self.steps)]
        share = self._share(way, step)
        synchronize(self.device)
        self.company.gather(None)  # a common start
        begin = time.perf_counter()
        way.step(share, step.loss_tokens)
        launched = time.perf_counter() - begin
        synchronize(self.device)
        every = self.company.gather((time.perf_counter() - begin, launched))
        return Sample(
            {
                "step_ms": 1000 * max(whole for whole, _ in every),
                "host_ms": 1000 * max(host for _, host in every),
            },
            step.tokens,
        )

    def _largest_alone(self, contest: Comparison) -> None:
        """What the bank of a way takes over a bank of one bucket: of the one that takes most, which
        is the fullest of some size (rows on one rank have most heads there, rows on all have most
        tokens in a head). Not compiled, which takes minutes. Collective."""
        for name in contest.running:
            pools = contest.extras[name].get("pool_bytes")
            if pools is None or "compile" in name or self._late():
                continue
            fullest = {bucket.tokens: bucket for bucket in self.buckets(name.partition("+")[0])}
            alone = [self._pool_alone(name, bucket) for bucket in fullest.values()]
            if all(alone):  # else nobody knows which takes most
                largest = max(alone)
                contest.extras[name] |= {
                    "largest_pool_bytes": largest,
                    "pool_ratio": round(max(pools) / largest, 4),
                }

    def _pool_alone(self, name: str, bucket: Capacity) -> int:
        """Bytes that a bank of one bucket takes on the rank where it takes most; 0 where it failed.
        Collective."""
        free_memory(self.device)
        way = self._way(name, [bucket])
        failed = self.company.first_reason(way.build([sample_batch(bucket)])) is not None
        taken = 0 if failed else max(self.company.gather(way.executor.pool_bytes()))
        way.close()
        return taken

    def _row(self, contest: Comparison, name: str) -> Row:
        options, steps = self.options, self.steps
        kind = name.partition("+")[0]
        what = {
            "benchmark": "context",
            "way": name,
            "model": options.model,
            "layers": options.config.num_layers,
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "ranks": options.ranks,
            "tokens": self.tokens,
            "sizes": [options.fixed] if kind == FIXED else list(options.sizes),
            "places": list(options.places),
            "granularity": options.granularity,
            "microbatches": options.microbatches,
            "kind": KIND,
            "attention": str(self.model.attention_choice()),
            "mean": options.mean,
            "sigma": options.sigma,
            "longest": options.longest,
            "seed": options.seed,
            "cost": None if self.cost is None else vars(self.cost),
            "cost_seconds": self.cost_seconds,
            "cost_note": self.cost_note,
        }
        if steps:
            plans = [step.plan for step in steps]
            predicted = (
                [plan.step_us for plan in plans]
                if kind == DYNAMIC
                else [step.fixed_us for step in steps]
            )
            what |= {
                "real_tokens": round(statistics.mean(step.tokens for step in steps), 1),
                "waves": [
                    sum(pack.capacity.tokens for pack in step.packs[kind])
                    // (options.ranks * self.tokens)
                    for step in steps
                ],
                "predicted_ms": round(statistics.mean(predicted) / 1000, 3),
                "bound_ms": round(statistics.mean(plan.bound.step_us for plan in plans) / 1000, 3),
                "balance": round(
                    statistics.mean(
                        plan.bound.step_us / us for plan, us in zip(plans, predicted, strict=True)
                    ),
                    4,
                ),
                "least_balance": round(
                    min(plan.bound.step_us / us for plan, us in zip(plans, predicted, strict=True)),
                    4,
                ),
                "plan_ms": round(self.plan_ms, 2),
            }
        found = contest.row(name, "step_ms", 1e-2 if self.device.type == "cuda" else 1e-5)
        medians = {
            way: statistics.median(sample.times["step_ms"] for sample in contest.samples[way])
            for way in (name, DYNAMIC)
            if contest.samples.get(way)
        }
        if len(medians) == len({name, DYNAMIC}) and found["reason"] is None:
            found["ratio_to_dynamic"] = round(medians[DYNAMIC] / medians[name], 4)
        return what | found
