"""`bench pipeline`: whole steps of a pipeline, by every way, on all ranks together.

A step's time is that of the slowest rank, from a common start to its own idle device. Two shares
tell where it goes:

    bubble_share   what waiting the schedule has by itself: simulated with the mean forward and
        backward time of a chunk
    idle_share     1 - (time of all chunks' forwards and backwards, measured alone) / (time of the
                   step), over all ranks
                   so also uneven stages, transfers and the host between two chunks

All ways (`PipelineWay`) have the same stages, schedule and links, replayed or not.
"""

import contextlib
import datetime
import statistics
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from bench_models import draw_batches, dtype_on, shape, squared_gradients, zero_gradients
from bench_step import FIRST, ComparedArguments
from bench_ways import compiled_stack
from rank_comparison import BenchRanks, RankComparison, first_warning, most_gibibytes
from torch import Tensor

from packgraph.bench.comparison import Check, Deadline, Sample, agreement
from packgraph.bench.rows import Column, Row, Rows, median, value
from packgraph.graphs.backend import Stopwatch, synchronize
from packgraph.graphs.fallback import eager
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.graphs.replay import ReplayHandle
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.ops.attention.api import BACKENDS
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links, make_links
from packgraph.parallel.pipeline.schedule import (
    legal_microbatches,
    make_schedule,
    simulate,
    slot_counts,
)
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.reading import ConfigError, Count, option

PIPELINE_WAYS = ("eager", "compile", "layer", "chunk", "step", "chunk+compile")
WITHOUT_GRAPHS = ("eager", "compile")
REPEATS = 5
STEPS = 4  # different steps of microbatches that the rounds go through
TIMEOUT = datetime.timedelta(minutes=4)
COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("ms / step", median("step_ms")),
    ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("ratio", value("ratio", ".2f")),
    ("rounds", value("rounds")),
    ("bubble", value("bubble_share", ".1%")),
    ("idle", value("idle_share", ".1%")),
    ("slots", lambda row: " ".join(str(sum(counts)) for counts in row["slots"] or ()) or "-"),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("most pool GiB", most_gibibytes("pool_bytes")),
    ("most peak GiB", most_gibibytes("peak_bytes")),
    ("loss", agreement),
]


class PipelineWay:
    """One way of running this rank's part of every step. name: one of PIPELINE_WAYS.

    modules: this rank's stages, by chunk. slots: of each chunk. Raises ValueError for a way that
    would not end.
    """

    def __init__(
        self,
        name: str,
        modules: list[DecoderModel],
        links: Links,
        slots: tuple[int, ...],
        capacity: Capacity,
    ) -> None:
        self.name, self.slots = name, slots
        config, parameter = modules[0].config, next(modules[0].parameters())
        self.device, self.dtype, self.width = parameter.device, parameter.dtype, config.hidden_size
        if name == "step" and len(modules) > 1 and self.device.type == "cpu":
            raise ValueError(
                "whole steps of several chunks per rank need CUDA: the CPU's recorder waits for "
                "all "
                "transfers under way at once, where chunks that take turns need them one by one"
            )
        self.stages = [chunk * links.size + links.rank for chunk in range(len(modules))]
        self.last_stage = len(modules) * links.size - 1
        inner = [compiled_stack(module) for module in modules] if name == "compile" else modules
        granularity = "layer" if name == "layer" else "chunk"
        self.chunks: list[GraphedModule] = [
            graph(
                module,
                capacities=[capacity],
                warmup=0,
                slots=count,
                granularity=granularity,
                compile=name.endswith("+compile"),
            )
            for module, count in zip(inner, slots, strict=True)
        ]
        self.pipeline = Pipeline(
            self.chunks, links, self.width, self.dtype, self.device, whole_steps=name == "step"
        )

    def warm_alone(self, batch: PackedBatch) -> None:
        """Run each chunk once without communication: compiles kernels and finds what fails on this
        rank alone."""
        if self.name in WITHOUT_GRAPHS:
            self.chunk_times(batch)

    def build(self, sample: PackedBatch) -> str | None:
        """Capture the chunks' graphs; why that failed on this rank, or somewhere. Collective."""
        if self.name in (*WITHOUT_GRAPHS, "step"):
            return None
        return first_warning(lambda: self.pipeline.build([sample], self.slots))

    def step(self, batches: list[PackedBatch], tokens: Tensor) -> Tensor:
        """Forward and backward of all microbatches: the loss, on every rank. Collective."""
        with eager(self.name) if self.name in WITHOUT_GRAPHS else contextlib.nullcontext():
            return self.pipeline.step(batches, tokens)

    def complaint(self) -> str | None:
        """Why the times are not those of this way: something ran eagerly, or not as a whole."""
        if self.name in WITHOUT_GRAPHS:
            return None
        whole = self.pipeline.step_stats
        every = [whole] if whole is not None else [chunk.stats for chunk in self.chunks]
        fallbacks: dict[str, int] = {}
        for stats in every:
            for reason, count in stats.fallbacks.items():
                fallbacks[reason] = fallbacks.get(reason, 0) + count
        what = (
            "steps ran by the chunks' graphs" if whole is not None else "microbatches ran eagerly"
        )
        return f"{what}: {fallbacks}" if fallbacks else None

    def facts(self) -> dict[str, Any]:
        """capture_seconds and pool_bytes of this rank; None without graphs."""
        if self.name in WITHOUT_GRAPHS:
            return {"capture_seconds": None, "pool_bytes": None}
        every = [chunk.stats for chunk in self.chunks]
        every += [self.pipeline.step_stats] if self.pipeline.step_stats is not None else []
        return {
            "capture_seconds": round(sum(stats.capture_seconds for stats in every), 3),
            "pool_bytes": sum(stats.pool_bytes for stats in every),
        }

    def chunk_times(self, batch: PackedBatch) -> list[tuple[float, float]]:
        """Per chunk the median milliseconds of (forward, backward) of one microbatch, without
        communication."""
        return [self._times(index, batch) for index in range(len(self.chunks))]

    def _times(self, index: int, batch: PackedBatch) -> tuple[float, float]:
        shape = (batch.capacity.tokens, self.width)
        received, gradient = (
            torch.randn(shape, device=self.device).to(self.dtype) for _ in range(2)
        )
        tokens = torch.ones((), dtype=torch.int64, device=self.device) * batch.num_loss_tokens
        laps = []
        for _ in range(REPEATS):
            hidden = () if self.stages[index] == 0 else (received.detach().requires_grad_(),)
            synchronize(self.device)
            watch = Stopwatch(self.device)
            watch.mark()
            out = self._forward(index, (batch, tokens, *hidden))
            watch.mark()
            if self.stages[index] == self.last_stage:
                out.backward()
            else:
                torch.autograd.backward(out, gradient)
            watch.mark()
            laps.append(watch.take_laps())
            del out, hidden
        return statistics.median(lap[0] for lap in laps), statistics.median(lap[1] for lap in laps)

    def _forward(self, index: int, arguments: tuple[Any, ...]) -> Tensor:
        chunk = self.chunks[index]
        if self.name in WITHOUT_GRAPHS:
            return chunk.module(*arguments)
        like = [
            torch.zeros((), dtype=self.dtype, device=self.device)
            .expand(hidden.shape)
            .requires_grad_()
            for hidden in arguments[2:]
        ]  # what the executor handles with: a key has strides in it
        handle = chunk.acquire((*arguments[:2], *like), {})
        if not isinstance(handle, ReplayHandle):
            raise RuntimeError(f"a chunk's graphs cannot be timed on their own: {handle}")
        return handle.run(arguments, {})

    def close(self) -> None:
        """Free all graphs. Before the process groups go, since graphs hold their communicators."""
        self.pipeline.close()


@dataclass(frozen=True, kw_only=True)
class PipelineArguments(ComparedArguments):
    """A whole step of a pipeline, under torchrun."""

    rounds: Count = option(12, "how often all ways take turns", metavar="N")
    ways: tuple[Annotated[str, PIPELINE_WAYS], ...] = option(PIPELINE_WAYS, FIRST)
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    attention: Annotated[str, ("auto", *BACKENDS)] = option(
        "auto", "attention of every way; auto = the fastest that there is; rows say which"
    )
    pp: Count | None = option(None, "pipeline ranks (default: all processes)", metavar="N")
    chunks: Count = option(1, "chunks per rank", metavar="N")
    microbatches: Count = option(8, "in a step", metavar="N")

    def on(self, device_type: str, launch: Launch) -> Self:
        """These options with what is usual for a device and a number of processes put in."""
        asked = replace(super().on(device_type, launch), pp=self.pp or launch.world)
        if problems := asked.refusals(launch):
            raise ConfigError(problems)
        return asked

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return self.pp or 1

    @property
    def config(self) -> DecoderConfig:
        """The whole decoder; embedding and head are untied, since they live on different ranks."""
        return replace(
            shape(str(self.model), self.layers),
            tie_embeddings=False,
            attention_backend=self.attention,
        )

    def refusals(self, launch: Launch) -> list[str]:
        """Why these processes cannot run this pipeline."""
        stages, layers = self.ranks * self.chunks, self.config.num_layers
        found = Layout(dp=1, pp=self.ranks).problems(launch.world)
        found += legal_microbatches(self.ranks, self.chunks, None, self.microbatches)
        if stages > layers:
            found.append(
                f"{self.ranks} ranks with {self.chunks} chunks make {stages} stages, but "
                f"{self.model} has {layers} layers: every stage needs one; see --layers"
            )
        if self.ranks == 1 and self.chunks > 1:
            found.append(
                f"{self.chunks} chunks on a single rank would send to itself: use --chunks 1, or "
                "start more processes (torchrun --nproc-per-node)"
            )
        return found


def bench_pipeline(
    options: PipelineArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
    """Connect the processes and measure. Raises on every rank's own errors after writing what there
    is."""
    with processes(Layout(dp=1, pp=options.ranks), device, Launch.read(), TIMEOUT) as mesh:
        measure_pipeline(options, device, make_links(mesh), rows, deadline)


def measure_pipeline(
    options: PipelineArguments, device: torch.device, links: Links, rows: Rows, deadline: Deadline
) -> None:
    """Measure everything in `options`; one row per number of tokens and way. Collective."""
    ranks = BenchRanks()
    modules = [
        DecoderModel(
            options.config,
            device=device,
            dtype=dtype_on(device),
            stages=options.ranks * options.chunks,
            stage=chunk * options.ranks + ranks.rank,
        )
        for chunk in range(options.chunks)
    ]
    zero_gradients(modules)
    for tokens in options.tokens:
        PipelineComparison(options, tokens, modules, links, ranks, deadline).measure(
            rows, options.together
        )


class PipelineComparison(RankComparison[PipelineWay]):
    """All ways at one number of tokens, on this rank."""

    def __init__(
        self,
        options: PipelineArguments,
        tokens: int,
        modules: list[DecoderModel],
        links: Links,
        ranks: BenchRanks,
        deadline: Deadline,
    ) -> None:
        device = next(modules[0].parameters()).device
        super().__init__(options.ways, options.rounds, device, deadline, ranks)
        self.options, self.modules, self.links = options, modules, links
        self.capacity = Capacity(tokens, options.documents)
        self.slots = slot_counts(options.ranks, options.chunks)
        count = options.microbatches
        batches = draw_batches(
            self.capacity, STEPS * count, options.config.vocab_size, **options.drawn
        )
        self.real_tokens = sum(batch.num_tokens for batch in batches) / STEPS
        self.steps: list[tuple[list[PackedBatch], torch.Tensor]] = []
        for start in range(0, len(batches), count):
            part = batches[start : start + count]
            labels = torch.tensor(sum(batch.num_loss_tokens for batch in part), device=device)
            self.steps.append(([batch.to(device) for batch in part], labels))

    def make(self, name: str) -> PipelineWay:
        """The way called `name`."""
        slots = self.slots[self.ranks.rank]
        return PipelineWay(name, self.modules, self.links, slots, self.capacity)

    def warm_up(self, way: PipelineWay) -> None:
        """Run each chunk once."""
        way.warm_alone(self.steps[0][0][0])

    def build(self, way: PipelineWay) -> str | None:
        """Capture, and run a step. Collective."""
        reason = self.ranks.first_reason(way.build(self.steps[0][0][0]))
        if reason is None:
            way.step(*self.steps[-1])
        return reason

    def check(self, way: PipelineWay) -> Check:
        """What the first step computes. Collective."""
        zero_gradients(self.modules)
        loss = float(way.step(*self.steps[0]))
        return Check(loss, sum(self.ranks.gather(squared_gradients(self.modules))) ** 0.5)

    def heaviest(self, way: PipelineWay) -> object:
        """Run the first step. Collective."""
        return way.step(*self.steps[0])

    def time(self, way: PipelineWay, number: int) -> list[Sample]:
        """One step. Collective."""
        batches, labels = self.steps[number % len(self.steps)]
        zero_gradients(self.modules)
        times = self.slowest(lambda: way.step(batches, labels))
        return [Sample(times, sum(batch.num_tokens for batch in batches))]

    def after(self, way: PipelineWay) -> Row:
        """bubble_share, idle_share and the milliseconds of each stage, from chunks measured alone.
        Collective."""
        found: Row = {}
        source: list[list[float]] | None = None
        if way.name != "step":
            mine, reason = self.ranks.attempt(lambda: way.chunk_times(self.steps[0][0][0]))
            every = self.ranks.gather(mine)
            if reason is None:
                source = [
                    [round(part, 4) for part in every[rank][chunk]]
                    for chunk in range(self.options.chunks)
                    for rank in range(self.options.ranks)
                ]
            found["stage_ms"] = source
        # A whole step runs what the chunks' graphs run.
        busy = source or self.results.extras.get("chunk", {}).get("stage_ms")
        known = busy or self.results.extras[self.names[0]].get("stage_ms")
        if known is not None:
            forward, backward = (statistics.mean(stage[part] for stage in known) for part in (0, 1))
            schedule = make_schedule(
                self.options.ranks, self.options.chunks, self.options.microbatches
            )
            found["bubble_share"] = round(simulate(schedule, forward, backward).bubble_share, 4)
        if busy is not None:
            mean = self.options.microbatches * sum(map(sum, busy)) / self.options.ranks
            step_ms = statistics.median(
                sample.times["step_ms"] for sample in self.results.samples[way.name]
            )
            found["idle_share"] = round(1 - mean / step_ms, 4)
        return found

    def what(self, name: str) -> Row:
        """Schedule, shapes and lengths of a way."""
        options = self.options
        return {
            "benchmark": "pipeline",
            "way": name,
            "model": options.model,
            "layers": options.config.num_layers,
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "ranks": options.ranks,
            "chunks": options.chunks,
            "microbatches": options.microbatches,
            "tokens": self.capacity.tokens,
            "documents": self.capacity.documents,
            "attention": str(self.modules[0].attention_choice()),
            **options.drawn,
            "real_tokens": round(self.real_tokens, 1),
            "padding": round(1 - self.real_tokens / self.capacity.tokens / options.microbatches, 5),
            "slots": None if name == "step" else [list(counts) for counts in self.slots],
        }
