"""The ways of running a whole step of a pipeline: the same stages, schedule and links, replayed or
not."""

import contextlib
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.compiled import CompiledStack, no_silent_eager
from packgraph.bench.models import FreshModel
from packgraph.bench.timing import Stopwatch, synchronize
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.fallback import eager
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.graphs.replay_handle import ReplayHandle
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links

PIPELINE_WAYS = ("eager", "compile", "layer", "chunk", "step", "chunk+compile")
WITHOUT_GRAPHS = ("eager", "compile")
REPEATS = 5


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
        ]  # what the executor claims with: a key has strides in it
        claim = chunk.acquire((*arguments[:2], *like), {})
        if not isinstance(claim, ReplayHandle):
            raise RuntimeError(f"a chunk's graphs cannot be timed on their own: {claim}")
        return claim.run(arguments, {})

    def close(self) -> None:
        """Free all graphs. Before the process groups go, since graphs hold their communicators."""
        self.pipeline.close()
