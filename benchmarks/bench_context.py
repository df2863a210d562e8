"""`bench context`: training steps whose rows are spread over one number of ranks, or over
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
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from bench_models import dtype_on, shape
from bench_step import FIRST, KILO, WorkArguments
from context_steps import (
    CONTEXT_WAYS,
    DYNAMIC,
    FIXED,
    USUAL_WAYS,
    ContextWay,
    PlannedStep,
    plan_steps,
    row_timer,
)
from rank_comparison import BenchRanks, RankComparison, most_gibibytes

from packgraph.bench.comparison import Check, Deadline, Sample, agreement, held_bytes
from packgraph.bench.rows import Column, Row, Rows, median, quantile, value
from packgraph.graphs.memory.allocator import free_memory
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.ops.attention.kind import ContextWish
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import PLACES, ContextRequest
from packgraph.parallel.context.rows import context_problems, spread_context
from packgraph.parallel.layout import Layout, context_sizes
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.reading import ConfigError, Count, option
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.features.context import measured_cost
from packgraph.train.feed import MicrobatchAssignment
from packgraph.train.optimizer import Optimizer
from packgraph.train.plan import context_cost
from packgraph.train.strategies import sample_batch

KIND: ContextWish = "ulysses"  # how ranks share attention
STEPS = 6  # different ones that the rounds go through
COLUMNS: list[Column] = [
    ("way", value("way")),
    ("ranks", value("ranks")),
    ("ms / step", median("step_ms")),
    ("p90", quantile("step_ms", "p90")),
    ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("ratio", value("ratio", ".2f")),
    ("to dynamic", value("ratio_to_dynamic", ".2f")),
    ("rounds", value("rounds")),
    ("host ms", median("host_ms")),
    ("balance", value("balance", ".1%")),
    ("predicted ms", value("predicted_ms", ".1f")),
    ("plan ms", value("plan_ms", ".1f")),
    ("most pool GiB", most_gibibytes("pool_bytes")),
    ("to largest", value("pool_ratio", ".3f")),
    ("most peak GiB", most_gibibytes("peak_bytes")),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("loss", agreement),
]


@dataclass(frozen=True, kw_only=True)
class ContextArguments(WorkArguments):
    """Training steps, rows over a fixed number of ranks or over what they need, under torchrun."""

    usual_models: ClassVar[tuple[str, str]] = ("gpt-2048", "tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (2 * KILO,)

    ways: tuple[Annotated[str, CONTEXT_WAYS], ...] = option(
        USUAL_WAYS, f"{FIRST}; compiling takes minutes"
    )
    rounds: Count = option(18, "how often all ways take turns", metavar="N")
    fixed: Count | None = option(
        None, "ranks of every row of the fixed ways (default: 4, or all there are)", metavar="N"
    )
    places: tuple[Count, ...] = option(PLACES, "for documents in a row", metavar="N ...")
    longest: Count | None = option(
        None,
        "longest document, in tokens (default: 8192, or what fits the fixed ways)",
        metavar="T",
    )
    microbatches: Count = option(8, "in a step", metavar="N")
    granularity: Literal["layer", "chunk"] = option("chunk", "what one graph holds")

    def on(self, device_type: str, launch: Launch) -> Self:
        """These options with what is usual for a device and a number of processes put in."""
        asked, fixed = super().on(device_type, launch), self.fixed or min(4, launch.world)
        longest = self.longest or min(8 * KILO, fixed * min(asked.tokens))
        asked = replace(asked, fixed=fixed, longest=longest)
        if problems := asked.refusals(launch):
            raise ConfigError(problems)
        return asked

    @property
    def config(self) -> DecoderConfig:
        """The model."""
        return shape(str(self.model), self.layers)

    def sizes(self, ranks: int) -> tuple[int, ...]:
        """Legal sizes of groups."""
        return tuple(sorted({*context_sizes(ranks), self.fixed or ranks}))

    def refusals(self, launch: Launch) -> list[str]:
        """Why these processes cannot run these steps."""
        fixed, longest = self.fixed or launch.world, self.longest or 0
        found = context_problems(self.config, launch.world, wish=KIND)
        if launch.world % fixed:
            found.append(
                f"--fixed {fixed}: groups of that size do not cover the {launch.world} ranks"
            )
        found += [
            f"a document of {longest} tokens does not fit {fixed} ranks with {tokens} tokens each: "
            "lower --longest, or raise --tokens or --fixed"
            for tokens in self.tokens
            if longest > fixed * tokens
        ]
        return found


def bench_context(
    options: ContextArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """Connect the processes and measure. Raises on every rank's own errors after writing what there
    is."""
    launch = Launch.read()
    layout = Layout(dp=1, cp=launch.world, contexts=options.sizes(launch.world))
    with processes(layout, device, launch) as mesh:
        measure_context(options, device, mesh, rows, deadline)


def measure_context(
    options: ContextArguments, device: torch.device, mesh: Mesh, rows: Rows, deadline: Deadline
) -> None:
    """Measure everything in `options`; one row per number of tokens and way. Collective."""
    ranks = BenchRanks()
    for tokens in options.tokens:
        ContextComparison(options, tokens, device, mesh, ranks, deadline).measure(rows)


class ContextComparison(RankComparison[ContextWay]):
    """All ways at one number of tokens per rank, on this rank.

    The bank that costs were measured with is that of the way timed later: `banks` has it, with the
    bytes held before it and the seconds of its build.
    """

    preparing = 0.7

    def __init__(
        self,
        options: ContextArguments,
        tokens: int,
        device: torch.device,
        mesh: Mesh,
        ranks: BenchRanks,
        deadline: Deadline,
    ) -> None:
        super().__init__(options.ways, options.rounds, device, deadline, ranks)
        self.options, self.tokens, self.mesh = options, tokens, mesh
        self.sizes, self.fixed = options.sizes(ranks.size), options.fixed or ranks.size
        self.model = DecoderModel(options.config, device=device, dtype=dtype_on(device)).train()
        spread_context(self.model, mesh, tokens, KIND)
        self.optimizer = Optimizer(self.model.named_parameters(), OptimizerConfig(), mesh)
        self.sharing = MicrobatchAssignment.of(mesh, tokens)
        self.steps: list[PlannedStep] = []
        self.measured: Row = {"cost": None, "cost_seconds": 0.0, "cost_note": ""}
        self.plan_ms = 0.0  # median of the slowest rank
        self.banks: dict[str, tuple[ContextWay, int | None, float]] = {}

    def buckets(self, kind: str) -> list[Capacity]:
        """The rows that plans of a kind of way may have, smallest first."""
        sizes = (self.fixed,) if kind == FIXED else self.sizes
        return sorted(
            Capacity(size * self.tokens, places) for size in sizes for places in self.options.places
        )

    def measure_group(self) -> None:
        """As a comparison does it, between plans and pools. Collective."""
        self.start()
        super().measure_group()
        self.finish()

    def start(self) -> None:
        """Measure what rows cost, and plan all steps by it. Collective."""
        options, names, began = self.options, self.names, time.monotonic()
        self.doing = next((name for name in names if "graph" in name), names[0])
        buckets, flash = self.buckets(DYNAMIC), self.model.attention_choice().name == "flash"
        before = held_bytes(self.device)
        way = self._way("dynamic+graph" if "graph" in self.doing else DYNAMIC, buckets)
        reason = self.ranks.first_reason(
            way.build([sample_batch(bucket) for bucket in buckets[::-1]])
        )
        if reason is not None:
            raise RuntimeError(f"what rows cost cannot be measured: {reason}")
        built = time.monotonic() - began
        request = ContextRequest(
            world=self.ranks.size,
            tokens=self.tokens,
            sizes=self.sizes,
            places=options.places,
            microsteps=options.microbatches,
            cost=context_cost(options.config, 1, FLASH4 if flash else CostModel()),
        )
        found = measured_cost(
            request, options.config.vocab_size, row_timer(way, self.ranks, self.device)
        )
        if found.cost is None:
            raise RuntimeError(found.note)
        if way.name in names:
            self.banks[way.name] = way, before, built
        else:
            way.close()
        free_memory(self.device)
        seconds = round(max(self.ranks.gather(time.monotonic() - began)), 3)
        self.measured = {
            "cost": vars(found.cost),
            "cost_seconds": seconds,
            "cost_note": found.note,
        }
        self.steps = plan_steps(
            STEPS,
            replace(request, cost=found.cost),
            self.fixed,
            options.config.vocab_size,
            longest=options.longest or 8 * KILO,
            **options.drawn,
        )
        self.plan_ms = max(
            self.ranks.gather(statistics.median(step.plan_ms for step in self.steps))
        )

    def begin(self, name: str) -> tuple[int | None, float]:
        """(bytes held before a way is made, when its making began)."""
        before, began = super().begin(name)
        if name in self.banks:
            _, before, spent = self.banks[name]
            began -= spent
        return before, began

    def make(self, name: str) -> ContextWay:
        """The way called `name`."""
        if name in self.banks:
            return self.banks[name][0]
        return self._way(name, self.buckets(name.partition("+")[0]))

    def too_late(self, name: str) -> str | None:
        """Why a way is not prepared any more, or None; frees the bank that costs were measured
        with. Collective."""
        reason = super().too_late(name)
        if reason is not None and name in self.banks:
            self.banks.pop(name)[0].close()
        return reason

    def build(self, way: ContextWay) -> str | None:
        """Capture, and run a step. Collective."""
        bank = self.banks.pop(way.name, None)
        reason = None
        if bank is None:
            reason = self.ranks.first_reason(way.build(self._share(way, self.steps[-1])))
        if reason is None:
            self._run(way, self.steps[-1])
        return reason

    def check(self, way: ContextWay) -> Check:
        """What the first step computes. Collective."""
        loss, norm = self._run(way, self.steps[0])
        return Check(sum(self.ranks.gather(float(loss))), float(norm))

    def heaviest(self, way: ContextWay) -> object:
        """Run the first step. Collective."""
        return self._run(way, self.steps[0])

    def time(self, way: ContextWay, number: int) -> list[Sample]:
        """One step. Collective."""
        step = self.steps[number % len(self.steps)]
        share = self._share(way, step)
        return [Sample(self.slowest(lambda: way.step(share, step.loss_tokens)), step.tokens)]

    def finish(self) -> None:
        """What the bank of a way takes over a bank of one bucket: of the one that takes most, which
        is the fullest of some size (rows on one rank have most heads there, rows on all have most
        tokens in a head). Not compiled, which takes minutes. Collective."""
        for name, extras in self.results.extras.items():
            pools = extras.get("pool_bytes")
            if name in self.results.reasons or pools is None or "compile" in name or self.late():
                continue
            fullest = {bucket.tokens: bucket for bucket in self.buckets(name.partition("+")[0])}
            alone = [self.pool_alone(name, bucket) for bucket in fullest.values()]
            if all(alone):  # else nobody knows which takes most
                largest = max(alone)
                extras |= {
                    "largest_pool_bytes": largest,
                    "pool_ratio": round(max(pools) / largest, 4),
                }

    def pool_alone(self, name: str, bucket: Capacity) -> int:
        """Bytes that a bank of one bucket takes on the rank where it takes most; 0 where it failed.
        Collective."""
        free_memory(self.device)
        way = self._way(name, [bucket])
        failed = self.ranks.first_reason(way.build([sample_batch(bucket)])) is not None
        taken = 0 if failed else max(self.ranks.gather(way.executor.pool_bytes()))
        way.close()
        return taken

    def what(self, name: str) -> Row:
        """Rows, costs and plans of a way."""
        options, kind = self.options, name.partition("+")[0]
        row: Row = {
            "benchmark": "context",
            "way": name,
            "model": options.model,
            "layers": options.config.num_layers,
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "ranks": self.ranks.size,
            "tokens": self.tokens,
            "sizes": [self.fixed] if kind == FIXED else list(self.sizes),
            "places": list(options.places),
            "granularity": options.granularity,
            "microbatches": options.microbatches,
            "kind": KIND,
            "attention": str(self.model.attention_choice()),
            **options.drawn,
            "longest": options.longest,
            **self.measured,
        }
        return row | self._planned(kind) if self.steps else row

    def row(self, name: str) -> Row:
        """The row of one way."""
        row, samples = super().row(name), self.results.samples
        if row["reason"] is None and samples.get(DYNAMIC):
            mine, dynamic = (
                statistics.median(sample.times["step_ms"] for sample in samples[way])
                for way in (name, DYNAMIC)
            )
            row["ratio_to_dynamic"] = round(dynamic / mine, 4)
        return row

    def _planned(self, kind: str) -> Row:
        steps, plans = self.steps, [step.plan for step in self.steps]
        predicted = [step.plan.step_us if kind == DYNAMIC else step.fixed_us for step in steps]
        balance = [plan.bound.step_us / us for plan, us in zip(plans, predicted, strict=True)]
        width = self.ranks.size * self.tokens
        return {
            "real_tokens": round(statistics.mean(step.tokens for step in steps), 1),
            "waves": [
                sum(pack.capacity.tokens for pack in step.packs[kind]) // width for step in steps
            ],
            "predicted_ms": round(statistics.mean(predicted) / 1000, 3),
            "bound_ms": round(statistics.mean(plan.bound.step_us for plan in plans) / 1000, 3),
            "balance": round(statistics.mean(balance), 4),
            "least_balance": round(min(balance), 4),
            "plan_ms": round(self.plan_ms, 2),
        }

    def _way(self, name: str, buckets: Sequence[Capacity]) -> ContextWay:
        granularity = self.options.granularity
        return ContextWay(
            name, self.model, self.optimizer, buckets, self.mesh, self.device, granularity
        )

    def _share(self, way: ContextWay, step: PlannedStep) -> list[Any]:
        return self.sharing.share(step.packs[way.groups])

    def _run(self, way: ContextWay, step: PlannedStep) -> tuple[torch.Tensor, torch.Tensor]:
        return way.step(self._share(way, step), step.loss_tokens)
