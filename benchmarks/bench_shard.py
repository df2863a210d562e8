"""`bench shard`: whole training steps on several ranks, sharded or not, beside FSDP2.

    block of a round    a step ahead, then `--steps` steps (forward and backward of all
                        microbatches, reduction, clipping, AdamW), then a wait

A step's time is that of the slowest rank, on the device from the end of one step to the end of the
next. Tokens are the real ones of a rank, the mean of all. Each way has its own model and optimizer,
so `--together 1` measures large shapes one way after the other. All run rows of one static shape,
with places for as many documents as the fullest row has, so nothing is compiled twice.

    of_alone           of packgraph's ways, where the way `alone` with the same words is measured:
                       the speed of several ranks over that of so many single ones, which update
                       all parameters each
    quiet_ms           where the way with `+quiet` is measured: the step without gathers and
                       reductions
    communication_ms   with --exchanges: the time in which the device runs collectives, waiting for
                       other ranks included, of a step under a profiler
    exposed_ms         of it the time in which it runs nothing else
    hidden_share       the rest of it; hidden_time_share: what the step is not longer than
                       quiet_ms

A way that fails, such as for want of memory, has to do so on all ranks at the same place: their
work has the same shapes, and all get as much memory as the one that has least. A rank that fails
alone leaves the others in a collective, whose time limit then ends the run.

How long the device exchanges data with other GPUs, and how long it does nothing else.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from bench_models import draw_batches, dtype_on, refit, shape
from bench_step import FIRST, KILO, ComparedArguments
from rank_comparison import BenchRanks, RankComparison, limited_alike, most_gibibytes
from shard_ways import OURS, QUIET, RankStep, ShardWay, WayName, make_way
from step_figures import device_intervals, union_length

from packgraph.bench.comparison import Check, Deadline, Sample, agreement, time_calls
from packgraph.bench.rows import FAILURES, Column, Row, Rows, figures, median, value, why
from packgraph.models.branches import head_sizes
from packgraph.models.decoder import DecoderConfig
from packgraph.ops.attention.api import BACKENDS, choose_backend
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.reading import Count, option
from packgraph.train.feed import count_loss_tokens, shares

# In the names of what exchanges data: NCCL's kernels, copies from other GPUs, barriers.
EXCHANGES = ("nccl", "PtoP", "symmetric_memory")


def exposed_length(
    exchanges: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> float:
    """Length of the part of `exchanges` in which none of `others` runs; intervals (begin, end)."""
    return union_length([*exchanges, *others]) - union_length(others)


@dataclass(frozen=True)
class ExchangeTimes:
    """Milliseconds of some calls in which the device runs collectives, and those of them in which
    it runs nothing else."""

    whole_ms: float
    exposed_ms: float


def _is_exchange(name: str) -> bool:
    return any(part in name for part in EXCHANGES)


def exchange_times(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object]
) -> ExchangeTimes | None:
    """How long NCCL's kernels, copies from other GPUs and barriers with them run while `run` runs,
    right after `lead`; None on a CPU. A copy of a rank's own part counts as other work.

    Raises RuntimeError where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    lead()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.events() or ()
    others = device_intervals(event for event in events if not _is_exchange(event.name))
    exchanges = device_intervals(event for event in events if _is_exchange(event.name))
    if not others:
        raise RuntimeError("torch.profiler recorded no kernel: CUPTI does not work here")
    return ExchangeTimes(union_length(exchanges) / 1000, exposed_length(exchanges, others) / 1000)


WAYS = ("fsdp+compile", "fsdp-keep+compile", "alone+compile", "none+compile", "parameters+compile")
STEPS = 4  # different steps that the rounds go through
TIMEOUT = datetime.timedelta(minutes=3)
COLUMNS: list[Column] = [
    ("ranks", value("ranks")),
    ("row", value("tokens")),
    ("a step", value("microbatches")),
    ("way", value("way")),
    ("tokens / s and rank", value("tokens_per_second", ",.0f")),
    ("step ms", median("step_ms", 1)),
    ("ratio", value("ratio", ".3f")),
    ("host ms", median("host_ms", 1)),
    ("most peak GiB", most_gibibytes("peak_bytes")),
    ("of alone", value("of_alone", ".3f")),
    ("without exchanges ms", value("quiet_ms", ".1f")),
    ("exchanges ms", value("communication_ms", ".1f")),
    ("exposed ms", value("exposed_ms", ".1f")),
    ("hidden", value("hidden_share", ".1%")),
    ("hidden time", value("hidden_time_share", ".1%")),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("result", agreement),
]


@dataclass(frozen=True, kw_only=True)
class ShardArguments(ComparedArguments):
    """Whole training steps on several ranks, sharded or not, beside FSDP2; under torchrun."""

    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 4 * KILO)

    rounds: Count = option(4, "how often all ways take turns", metavar="N")
    steps: Count = option(
        2, "steps in a row without a wait, after one that is not timed", metavar="N"
    )
    ways: tuple[str, ...] = option(
        WAYS,
        "alone, none, gradients, parameters (each with +layer or +step, +compile, +offload, or "
        "+offload=60 with 60 % of the optimizer's state on the device, +quiet without exchanges, "
        "+collectives in place of copies between GPUs), "
        f"fsdp, fsdp-keep (each with +compile, +prefetch); {FIRST}",
        metavar="WAY ...",
    )
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    step_tokens: Count = option(32 * KILO, "tokens of a step and rank", metavar="T")
    attention: Annotated[str, ("auto", *BACKENDS)] = option(
        "auto", "attention of every way; auto = the fastest that there is; rows say which"
    )
    exchanges: bool = option(
        False, "profile a step of each way, and tell how long it runs collectives"
    )

    def problems(self) -> list[str]:
        """What is wrong with further options."""
        found = super().problems()
        for name in self.ways:
            try:
                WayName.read(name)
            except ValueError as error:
                found.append(f"--ways: {error}")
        return found

    @property
    def config(self) -> DecoderConfig:
        """Of the decoder."""
        return replace(shape(str(self.model), self.layers), attention_backend=self.attention)


def bench_shard(
    options: ShardArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """Connects the processes and measures. Raises on every rank's own errors after writing what
    there is."""
    with processes(Layout(), device, Launch.read(), TIMEOUT) as mesh:
        measure_shard(options, device, mesh, rows, deadline)


def measure_shard(
    options: ShardArguments, device: torch.device, mesh: Mesh, rows: Rows, deadline: Deadline
) -> None:
    """Measures everything in `options`; one row per number of tokens and way. Collective."""
    ranks = BenchRanks()
    with limited_alike(device, ranks):
        for tokens in options.tokens:
            ShardComparison(options, tokens, device, mesh, ranks, deadline).measure(
                rows, options.together
            )


class ShardComparison(RankComparison[ShardWay]):
    """All ways at one number of tokens a row, on this rank."""

    least_rounds, preparing = 1, 0.8

    def __init__(
        self,
        options: ShardArguments,
        tokens: int,
        device: torch.device,
        mesh: Mesh,
        ranks: BenchRanks,
        deadline: Deadline,
    ) -> None:
        super().__init__(options.ways, options.rounds, device, deadline, ranks)
        self.options, self.mesh, self.tokens = options, mesh, tokens
        self.per_step = max(1, options.step_tokens // tokens)
        together = self.per_step * ranks.size
        drawn = draw_batches(
            Capacity(tokens, options.documents),
            STEPS * together,
            options.config.vocab_size,
            **options.drawn,
        )
        self.capacity = Capacity(tokens, max(pack.num_documents for pack in drawn))
        packs = [refit(pack, self.capacity) for pack in drawn]
        self.steps = [
            RankStep(
                shares(packs[start : start + together], ranks.size, ranks.size)[ranks.rank],
                count_loss_tokens(packs[start : start + together]),
                sum(pack.num_tokens for pack in packs[start : start + together]) / ranks.size,
            )
            for start in range(0, len(packs), together)
        ]
        self.step_ms: dict[str, float] = {}  # of ways that were measured

    def make(self, name: str) -> ShardWay:
        """The way called `name`."""
        return make_way(name, self.options.config, self.capacity, self.mesh, self.device)

    def build(self, way: ShardWay) -> str | None:
        """Compile and capture. Collective."""
        try:
            way.prepare(self.steps)
        except FAILURES as error:
            return why(error)
        return None

    def check(self, way: ShardWay) -> Check:
        """What the first step after that computes. Collective."""
        loss, norm = self.ranks.together(lambda: [float(part) for part in way.step(self.steps[0])])
        return Check(sum(self.ranks.gather(loss)), norm)

    def heaviest(self, way: ShardWay) -> object:
        """Run a step. Collective."""
        return self.ranks.together(lambda: way.step(self.steps[0]))

    def time(self, way: ShardWay, number: int) -> list[Sample]:
        """The steps of a round, in a row. Collective."""
        if number == 0:
            way.watch()
        first = number * self.options.steps
        steps = [self.steps[(first + n) % STEPS] for n in range(self.options.steps)]

        def run(mark: Callable[[], None]) -> None:
            for step in steps:
                way.step(step)
                mark()

        def lead() -> object:
            return way.step(self.steps[(first - 1) % STEPS])

        self.ranks.gather(None)
        laps, host = self.ranks.together(lambda: time_calls(self.device, run, lead))
        every = self.ranks.gather((laps, host / len(steps)))
        host = max(host for _, host in every)
        return [
            Sample({"step_ms": max(laps), "host_ms": host}, step.tokens)
            for step, *laps in zip(steps, *(laps for laps, _ in every), strict=True)
        ]

    def after(self, way: ShardWay) -> Row:
        """How long a step runs collectives, on the rank where most of that is exposed.
        Collective."""
        if not self.options.exchanges:
            return {}
        mine, reason = self.ranks.attempt(
            lambda: exchange_times(
                self.device, lambda: way.step(self.steps[0]), lambda: way.step(self.steps[1])
            )
        )
        found = [times for times in self.ranks.gather(mine) if times is not None]
        if reason is not None or not found:
            return {"exchanges_reason": reason}
        most = max(found, key=lambda times: times.exposed_ms)
        share = most.exposed_ms / most.whole_ms if most.whole_ms else None
        return {
            "communication_ms": round(most.whole_ms, 4),
            "exposed_ms": round(most.exposed_ms, 4),
            "hidden_share": None if share is None else round(1 - share, 5),
        }

    def what(self, name: str) -> Row:
        """Shapes and lengths of a way."""
        options, config, dtype = self.options, self.options.config, dtype_on(self.device)
        real = sum(step.tokens for step in self.steps) / STEPS
        choice = choose_backend(self.device, dtype, *head_sizes(config)).name
        return {
            "benchmark": "shard",
            "way": name,
            "model": options.model,
            "layers": config.num_layers,
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": self.ranks.size,
            "tokens": self.tokens,
            "documents": self.capacity.documents,
            "microbatches": self.per_step,
            "attention": choice if options.attention == "auto" else options.attention,
            "attention_asked": options.attention,
            **options.drawn,
            "real_tokens": round(real, 1),
            "padding": round(1 - real / self.tokens / self.per_step, 5),
        }

    def row(self, name: str) -> Row:
        """The row of one way: real tokens a second and rank, and how it compares with the same way
        alone, and without exchanges."""
        row, samples, said = super().row(name), self.results.samples[name], WayName.read(name)
        row |= dict.fromkeys(("tokens_per_second", "of_alone", "quiet_ms", "hidden_time_share"))
        if row["reason"] is not None:
            return row
        rates = figures([1000 * one.tokens / one.times["step_ms"] for one in samples])
        row["figures"]["tokens_per_second"], row["tokens_per_second"] = rates, rates["median"]
        self.step_ms[name] = step_ms = row["figures"]["step_ms"]["median"]
        if not (said.sums and WayName.read(row["against"]).sums):
            row |= {"loss_difference": None, "gradient_difference": None, "agrees": None}
        if said.kind not in OURS or not said.sums:
            return row
        alone, without = self._median(said.alone(name)), self._median(f"{name}+{QUIET}")
        row |= {"quiet_ms": without, "of_alone": alone and round(alone / step_ms, 5)}
        if without is not None and (communication := row.get("communication_ms")):
            row["hidden_time_share"] = round(1 - (step_ms - without) / communication, 5)
        return row

    def _median(self, name: str) -> float | None:
        """Milliseconds of a step of another way of this group, or of an earlier one."""
        samples = self.results.samples.get(name)
        if not samples or name in self.results.reasons:
            return self.step_ms.get(name)
        return figures([one.times["step_ms"] for one in samples])["median"]
