"""`packgraph bench pipeline`: whole steps of a pipeline, by every way, on all ranks together.

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
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.baselines import CompiledStack, no_silent_eager
from packgraph.bench.comparison import BenchRanks, Check, Comparison, Sample, agreement, groups
from packgraph.bench.models import (
    FreshModel,
    draw_batches,
    dtype_on,
    shape,
    squared_gradients,
    zero_gradients,
)
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, value
from packgraph.bench.timing import (
    Deadline,
    Stopwatch,
    held_bytes,
    peak_bytes,
    rounds_in_turn,
    start_anew,
    synchronize,
)
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.fallback import eager
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.replay import ReplayHandle
from packgraph.models.decoder import DecoderConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links, make_links
from packgraph.parallel.pipeline.schedule import make_schedule, simulate, slot_counts
from packgraph.parallel.processes import Launch, processes

PIPELINE_WAYS = ("eager", "compile", "layer", "chunk", "step", "chunk+compile")
WITHOUT_GRAPHS = ("eager", "compile")
REPEATS = 5
__all__ = ["COLUMNS", "PIPELINE_WAYS", "PipelineOptions", "bench_pipeline", "measure_pipeline"]
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
    ("most pool GiB", gibibytes("pool_bytes")),
    ("most peak GiB", gibibytes("peak_bytes")),
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
        modules: list[FreshModel],
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
        inner = [CompiledStack(module) for module in modules] if name == "compile" else modules
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
            with no_silent_eager():
                self.chunk_times(batch)

    def build(self, sample: PackedBatch) -> str | None:
        """Capture the chunks' graphs; why that failed on this rank, or somewhere. Collective."""
        if self.name in (*WITHOUT_GRAPHS, "step"):
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PackgraphWarning)
            if self.pipeline.build([sample], self.slots):
                return None
        texts = [
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, PackgraphWarning)
        ]
        return " ".join(texts[0].split()) if texts else None

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
            laps.append(watch.laps())
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


@dataclass(frozen=True)
class PipelineOptions:
    """What to measure. ranks, chunks, microbatches: of the schedule; the rest as in StepOptions."""

    model: str
    layers: int | None
    tokens: tuple[int, ...]
    documents: int
    ways: tuple[str, ...]
    rounds: int
    mean: float
    sigma: float
    seed: int
    together: int | None
    ranks: int
    chunks: int
    microbatches: int
    attention: str = "auto"

    @property
    def config(self) -> DecoderConfig:
        """The whole decoder; embedding and head are untied, since they live on different ranks."""
        return replace(
            shape(self.model, self.layers), tie_embeddings=False, attention_backend=self.attention
        )

    def problems(self) -> list[str]:
        """Why these options describe no pipeline."""
        stages, layers = self.ranks * self.chunks, self.config.num_layers
        found = (
            []
            if stages <= layers
            else [
                f"{self.ranks} ranks with {self.chunks} chunks make {stages} stages, but "
                f"{self.model} has {layers} layers: "
                "every stage needs one; see --layers"
            ]
        )
        if self.ranks == 1 and self.chunks > 1:
            found.append(
                f"{self.chunks} chunks on a single rank would send to itself: use --chunks 1, or "
                "start more "
                "processes (torchrun --nproc-per-node)"
            )
        return found


def bench_pipeline(
    options: PipelineOptions, device: torch.device, launch: Launch, rows: Rows, deadline: Deadline
) -> None:
    """Connect the processes of `launch` and measure. Raises on every rank's own errors after
    writing what there is."""
    with processes(Layout(dp=1, pp=options.ranks), device, launch, TIMEOUT) as mesh:
        links = make_links(mesh)
        measure_pipeline(options, device, links, BenchRanks(), rows, deadline)


def measure_pipeline(
    options: PipelineOptions,
    device: torch.device,
    links: Links,
    company: BenchRanks,
    rows: Rows,
    deadline: Deadline,
) -> None:
    """Measure everything in `options`; one row per number of tokens and way. Collective."""
    stages = options.ranks * options.chunks
    modules = [
        FreshModel(
            options.config,
            device=device,
            dtype=dtype_on(device),
            stages=stages,
            stage=chunk * options.ranks + company.rank,
        )
        for chunk in range(options.chunks)
    ]
    zero_gradients(modules)
    for tokens in options.tokens:
        bench = _PipelineBench(
            options, Capacity(tokens, options.documents), modules, links, company, deadline
        )
        for number, names in enumerate(groups(options.ways, options.together)):
            bench.measure(names, names[1:] if number else names, rows)
            start_anew(device)


class _PipelineBench:
    """All ways at one capacity, on this rank."""

    def __init__(
        self,
        options: PipelineOptions,
        capacity: Capacity,
        modules: list[FreshModel],
        links: Links,
        company: BenchRanks,
        deadline: Deadline,
    ) -> None:
        self.options, self.capacity, self.modules = options, capacity, modules
        self.links, self.company, self.deadline = links, company, deadline
        self.device = next(modules[0].parameters()).device
        self.slots = slot_counts(options.ranks, options.chunks)
        count = options.microbatches
        batches = draw_batches(
            capacity,
            STEPS * count,
            options.config.vocab_size,
            mean=options.mean,
            sigma=options.sigma,
            seed=options.seed,
        )
        self.real_tokens = sum(batch.num_tokens for batch in batches) / STEPS
        self.steps: list[tuple[list[PackedBatch], torch.Tensor]] = []
        for start in range(0, len(batches), count):
            part = batches[start : start + count]
            labels = torch.tensor(sum(batch.num_loss_tokens for batch in part), device=self.device)
            self.steps.append(([batch.to(self.device) for batch in part], labels))

    def measure(self, names: list[str], shown: list[str], rows: Rows) -> None:
        """Prepare all ways, let them take turns, close them; write the rows of `shown`."""
        contest, ways = Comparison(names), dict[str, PipelineWay]()
        doing = [names[0]]
        try:
            with self.company.leaving(contest, doing, rows):
                self._measure(contest, ways, doing)
        finally:
            for name in shown:
                rows.add(self._row(contest, name))

    def _measure(self, contest: Comparison, ways: dict[str, PipelineWay], doing: list[str]) -> None:
        for name in contest.names:
            doing[0] = name
            if self._late():
                contest.drop(name, self.deadline.reason)
                continue
            self._prepare(contest, ways, name)
            if name in contest.reasons and name in ways:
                ways.pop(name).close()
            free_memory(self.device)

        def run(name: str, number: int) -> None:
            doing[0] = name
            contest.samples[name].append(self._time(ways[name], number))

        runs = {name: lambda number, name=name: run(name, number) for name in ways}
        rounds_in_turn(runs, self.options.rounds, self._late)
        for name in list(ways):
            doing[0] = name
            contest.drop(name, self.company.first_reason(ways[name].complaint()))
            if not contest.samples[name]:
                contest.drop(name, self.deadline.reason)
            if name not in contest.reasons:
                self._shares(contest, ways[name])
        for way in ways.values():
            way.close()
        free_memory(self.device)

    def _late(self) -> bool:
        """Whether the time is up on any rank. Collective."""
        return any(self.company.gather(self.deadline.passed()))

    def _prepare(self, contest: Comparison, ways: dict[str, PipelineWay], name: str) -> None:
        """Make a way, capture, warm it up, check what it computes, measure its memory.
        Collective."""
        free_memory(self.device)
        before, began = held_bytes(self.device), time.monotonic()

        def alone() -> None:
            ways[name] = PipelineWay(
                name, self.modules, self.links, self.slots[self.company.rank], self.capacity
            )
            ways[name].warm_alone(self.steps[0][0][0])

        contest.drop(name, self.company.attempt(alone)[1])
        if name in contest.reasons:
            return
        way = ways[name]
        contest.drop(name, self.company.first_reason(way.build(self.steps[0][0][0])))
        if name in contest.reasons:
            return
        way.step(*self.steps[-1])
        synchronize(self.device)
        prepared = round(max(self.company.gather(time.monotonic() - began)), 3)
        zero_gradients(self.modules)
        loss = float(way.step(*self.steps[0]))
        squares = sum(self.company.gather(squared_gradients(self.modules)))
        contest.checks[name] = Check(loss, squares**0.5)
        peak = peak_bytes(self.device, lambda: way.step(*self.steps[0]))
        contest.extras[name] = {"prepare_seconds": prepared} | self._of_all_ranks(
            way.facts() | {"peak_bytes": None if peak is None or before is None else peak - before}
        )

    def _of_all_ranks(self, mine: Row) -> Row:
        """Each fact as a list by rank; None where no rank has it."""
        every = self.company.gather(mine)
        lists: dict[str, list[Any]] = {key: [facts[key] for facts in every] for key in mine}
        return {
            key: None if all(part is None for part in parts) else parts
            for key, parts in lists.items()
        }

    def _time(self, way: PipelineWay, number: int) -> Sample:
        batches, labels = self.steps[number % len(self.steps)]
        zero_gradients(self.modules)
        synchronize(self.device)
        self.company.gather(None)  # a common start
        begin = time.perf_counter()
        way.step(batches, labels)
        launched = time.perf_counter() - begin
        synchronize(self.device)
        every = self.company.gather((time.perf_counter() - begin, launched))
        return Sample(
            {
                "step_ms": 1000 * max(whole for whole, _ in every),
                "host_ms": 1000 * max(host for _, host in every),
            },
            sum(batch.num_tokens for batch in batches),
        )

    def _shares(self, contest: Comparison, way: PipelineWay) -> None:
        """bubble_share, idle_share and the milliseconds of each stage, from chunks measured alone.
        Collective."""
        source: list[list[float]] | None = None
        if way.name != "step":
            mine, reason = self.company.attempt(lambda: way.chunk_times(self.steps[0][0][0]))
            every = self.company.gather(mine)
            if reason is None:
                source = [
                    [round(part, 4) for part in every[rank][chunk]]
                    for chunk in range(self.options.chunks)
                    for rank in range(self.options.ranks)
                ]
            contest.extras[way.name]["stage_ms"] = source
        # A whole step runs what the chunks' graphs run.
        busy = source or contest.extras.get("chunk", {}).get("stage_ms")
        known = busy or contest.extras[contest.names[0]].get("stage_ms")
        if known is not None:
            forward, backward = (statistics.mean(stage[part] for stage in known) for part in (0, 1))
            schedule = make_schedule(
                self.options.ranks, self.options.chunks, self.options.microbatches
            )
            contest.extras[way.name]["bubble_share"] = round(
                simulate(schedule, forward, backward).bubble_share, 4
            )
        if busy is not None:
            mean = self.options.microbatches * sum(map(sum, busy)) / self.options.ranks
            step_ms = statistics.median(
                sample.times["step_ms"] for sample in contest.samples[way.name]
            )
            contest.extras[way.name]["idle_share"] = round(1 - mean / step_ms, 4)

    def _row(self, contest: Comparison, name: str) -> Row:
        options = self.options
        what = {
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
            "mean": options.mean,
            "sigma": options.sigma,
            "seed": options.seed,
            "real_tokens": round(self.real_tokens, 1),
            "padding": round(1 - self.real_tokens / self.capacity.tokens / options.microbatches, 5),
            "slots": None if name == "step" else [list(counts) for counts in self.slots],
        }
        return what | contest.row(name, "step_ms", 1e-2 if self.device.type == "cuda" else 1e-5)
