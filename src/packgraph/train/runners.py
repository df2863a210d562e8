"""Runners of a rank's microbatches in an optimizer step.

`MicrobatchRunner` runs them one after another, by a graph for each capacity; `StepRunner`
(`step_runner.py`) a whole step and its update as one graph; `PipelineRunner` this rank's part of a
pipeline's schedule. Which of them a run has is decided once, in `build.py`; the executor
(`executor.py`) treats them alike.

In a pipeline the number of slots is what the schedule needs for any number of microbatches; all
graphs are captured in them after the warm-up steps. With granularity `step` the whole schedule of
this rank is one graph where that can be.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from packgraph.graphs.agreement import Consensus
from packgraph.graphs.backend import profiler_range
from packgraph.graphs.fallback import WARM_UP, Stats, eager
from packgraph.graphs.graphed import GraphedModule, control, forward_backward, graph
from packgraph.graphs.key import undeclared
from packgraph.graphs.stages import Staged, in_scope
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.consensus import agreement_of_all
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.executor import Around, Pipeline, StepUpdate
from packgraph.parallel.pipeline.links import make_links
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.config.sections import GraphConfig, TrainConfig
from packgraph.train.features.context import rank_rows
from packgraph.train.optimizer import Optimizer
from packgraph.train.step import BeforeLast, accumulate


class Ways(Protocol):
    """Says by contexts which work runs through graphs and which eagerly."""

    def microbatch(self, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one microbatch."""

    def step(self, batches: Sequence[PackedBatch]) -> contextlib.AbstractContextManager[None]:
        """Around all of a step."""


class _Graphs:
    """Everything runs through graphs."""

    def microbatch(self, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self, batches: Sequence[PackedBatch]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


GRAPHS: Ways = _Graphs()


class Runner(Protocol):
    """Runs the microbatches of a step.

    Attributes:
        replays: Whether warm-up is over, so that graphs are replayed.
        captures_ahead: Whether `build` captures what steps will need; otherwise a step captures
            what it needs.
    """

    replays: bool
    captures_ahead: bool

    @property
    def graphed(self) -> Sequence[GraphedModule]:
        """The chunks of the model that this rank runs; empty where graphs are off."""

    @property
    def slots(self) -> Sequence[int]:
        """Microbatches in flight of each chunk."""

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """Arguments of a call of chunk number `chunk` with this capacity, for capture."""

    def build(self, capacities: Sequence[Capacity]) -> None:
        """Captures these capacities, largest first."""

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
        ways: Ways = GRAPHS,
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; see `step.accumulate`."""

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
        ways: Ways = GRAPHS,
    ) -> tuple[Tensor, Tensor]:
        """A whole optimizer step: its loss, and the gradient norm before clipping."""

    def evaluate(self, batches: Sequence[PackedBatch], around: Around) -> Tensor:
        """Forwards alone of these microbatches, where gradients are off.

        around: opened around each of them. Returns the sum of the token losses that this rank
        knows, float64 [] on the device.
        """

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """Agrees about captures by `stage`; about those of whole steps, which reach over all
        stages, by `replica`."""

    def free_whole_steps(self) -> None:
        """Frees the graphs of whole steps."""

    @property
    def step_stats(self) -> Stats | None:
        """Counts of graphs of whole steps, None where there are none."""

    def close(self) -> None:
        """Frees all graphs and their memory."""


def step_and_update(
    runner: Runner,
    batches: Sequence[PackedBatch],
    loss_tokens: int,
    optimizer: Optimizer,
    learning_rate: float,
    ways: Ways,
) -> tuple[Tensor, Tensor]:
    """`Runner.train_step` by `run_step` and the optimizer's own step."""
    optimizer.zero_grad()
    overlap = optimizer.flat.overlap if optimizer.flat.group is not None else None
    loss = runner.run_step(batches, loss_tokens, overlap, ways)
    return loss, optimizer.step(learning_rate, loss)


class MicrobatchRunner:
    """Runs microbatches of one model one after another; a `Runner`."""

    captures_ahead = True
    step_stats: Stats | None = None

    def __init__(self, model: nn.Module, options: GraphConfig, device: torch.device) -> None:
        self.model, self.replays = model, False
        self._device = device
        self.slots = [options.slots or 1]
        self.graphed: list[GraphedModule] = []
        if options.enabled:
            # One call of warm-up shows which outputs get gradients; the executor counts the rest of
            # the warm-up steps.
            self.graphed = [
                graph(
                    model,
                    capacities=options.captured_capacities(),
                    backend=options.backend,
                    warmup=1,
                    slots=options.slots,
                    strict=options.strict,
                    scope=options.scope,
                    granularity=options.granularity,
                    compile=options.compile,
                )
            ]

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """See `Runner.arguments`."""
        tokens_in_step = torch.ones((), dtype=torch.int64, device=self._device)
        return sample_batch(capacity).to(self._device), tokens_in_step

    def build(self, capacities: Sequence[Capacity]) -> None:
        """See `Runner.build`."""
        for graphed in self.graphed:
            graphed.build([self.arguments(0, capacity) for capacity in capacities])

    def loss(self, batch: PackedBatch, tokens_in_step: Tensor) -> Tensor:
        """Loss of one microbatch on the device, float32 []: its sum of token losses /
        tokens_in_step (int64 [])."""
        if not self.graphed:
            return self.model(batch, tokens_in_step)
        (graphed,) = self.graphed
        if self.replays or not graphed.stats.fallbacks:
            return graphed(batch, tokens_in_step)
        with eager(WARM_UP):
            return graphed(batch, tokens_in_step)

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
        ways: Ways = GRAPHS,
    ) -> Tensor:
        """See `Runner.run_step`."""
        if not self.graphed or not self.replays:
            return accumulate(
                self.loss, batches, self._device, loss_tokens=loss_tokens, before_last=before_last
            )
        (graphed,) = self.graphed
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        with graphed.frozen():
            for number, batch in enumerate(batches):
                before = before_last if number == len(batches) - 1 else None
                with ways.microbatch(batch), profiler_range("microbatch", number, batch.capacity):
                    total += forward_backward(
                        graphed, batch.to(self._device), tokens_in_step, before=before
                    )
        return total

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
        ways: Ways = GRAPHS,
    ) -> tuple[Tensor, Tensor]:
        """See `Runner.train_step`."""
        return step_and_update(self, batches, loss_tokens, optimizer, learning_rate, ways)

    def evaluate(self, batches: Sequence[PackedBatch], around: Around) -> Tensor:
        """See `Runner.evaluate`."""
        one = torch.ones((), dtype=torch.int64, device=self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        forward: Callable[..., Tensor] = self.model
        if self.graphed:  # in warm-up uncounted: it is a matter of training
            own = control(self.graphed[0])
            forward = own if self.replays else own.run_eagerly
        for number, batch in enumerate(batches):
            with around(batch), profiler_range("evaluation", number, batch.capacity):
                total += forward(batch.to(self._device), one)
        return total

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """See `Runner.agree_by`."""
        for graphed in self.graphed:
            control(graphed).consensus = stage

    def free_whole_steps(self) -> None:
        """There are none."""

    def close(self) -> None:
        """See `Runner.close`."""
        for graphed in self.graphed:
            graphed.close()


def sample_batch(capacity: Capacity) -> PackedBatch:
    """A valid microbatch of one document of token 0, for capture: only its shapes matter.

    One of half the row fits however documents are padded; two halves do not, where rows are cut in
    zigzag.
    """
    return PackedBatch.build([[0] * min(capacity.bound, max(1, capacity.tokens // 2))], capacity)


OFF = "graphs are off"


class PipelineRunner:
    """Runs this rank's chunks of a pipeline; a `Runner`. Collective: every rank of the pipeline
    runs the same steps."""

    captures_ahead = True

    def __init__(
        self, chunks: Sequence[nn.Module], config: TrainConfig, device: torch.device, mesh: Mesh
    ) -> None:
        """chunks: this rank's part of the model, in the order of its stages."""
        options = config.graph
        self._options, self._device = options, device
        self.replays = False
        links = make_links(mesh)
        self.slots = slot_counts(links.size, len(chunks))[links.rank]
        self.graphed = [
            graph(
                chunk,
                capacities=options.captured_capacities(),
                backend=options.backend,
                warmup=0,
                slots=slots,
                strict=options.strict,
                scope=_own_scope(chunk, options),
                granularity="chunk" if options.granularity == "step" else options.granularity,
                compile=options.compile,
            )
            for chunk, slots in zip(chunks, self.slots, strict=True)
        ]
        self._parameters = [list(chunk.parameters()) for chunk in chunks]
        self._pipeline = Pipeline(
            self.graphed,
            links,
            config.model.hidden_size,
            getattr(torch, config.run.dtype),
            device,
            whole_steps=options.granularity == "step" and options.enabled,
            row_parts=config.parallel.row_parts,
            rank_rows=rank_rows(config),
            updates=options.optimizer,
            agreement=agreement_of_all(mesh) if options.optimizer else None,
        )
        self._update: StepUpdate | None = None

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
        ways: Ways = GRAPHS,
    ) -> Tensor:
        """See `Runner.run_step`.

        before_last: called for each chunk, with the output whose backward is its last and the
        chunk's parameters; not called where a whole step is one graph.
        """
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        if not batches:  # a step with fewer packs than replicas: all ranks of this one have none
            return torch.zeros((), dtype=torch.float32, device=self._device)

        def settle(chunk: int, output: Tensor) -> None:
            assert before_last is not None
            before_last(output, self._parameters[chunk])

        uploaded = [batch.to(self._device) for batch in batches]
        with self._bypass(), ways.step(batches):
            return self._pipeline.step(
                uploaded, tokens_in_step, None if before_last is None else settle
            )

    def _bypass(self) -> contextlib.AbstractContextManager[None]:
        if not self._options.enabled:
            return eager(OFF)
        return contextlib.nullcontext() if self.replays else eager(WARM_UP)

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
        ways: Ways = GRAPHS,
    ) -> tuple[Tensor, Tensor]:
        """See `Runner.train_step`; by one replay where graphs hold the update.

        Raises:
            CaptureError: With `strict`, if the step cannot be captured.
        """
        options = self._options
        if options.enabled and options.optimizer and self.replays and batches:
            made = self._in_one(batches, loss_tokens, optimizer, learning_rate, ways)
            if made is not None:
                return made
        return step_and_update(self, batches, loss_tokens, optimizer, learning_rate, ways)

    def _in_one(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
        ways: Ways,
    ) -> tuple[Tensor, Tensor] | None:
        """The step and its update by one graph; None where that cannot be."""
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        uploaded = [batch.to(self._device) for batch in batches]
        self._update = self._update or _update_of(optimizer, self._parameters)
        optimizer.set_learning_rate(learning_rate)
        options = self._options
        with self._bypass(), ways.step(batches):
            result = self._pipeline.update_step(
                uploaded,
                tokens_in_step,
                self._update,
                undeclared((tokens_in_step, *uploaded), {}, options.captured_capacities()),
                strict=options.strict,
            )
        return None if result is None else (result[0], result[1])

    def evaluate(self, batches: Sequence[PackedBatch], around: Around) -> Tensor:
        """See `Runner.evaluate` and `Pipeline.evaluate`."""
        one = torch.ones((), dtype=torch.int64, device=self._device)
        if not batches:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        uploaded = [batch.to(self._device) for batch in batches]
        with self._bypass():
            return self._pipeline.evaluate(uploaded, one, around)

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """See `Runner.arguments`."""
        return self._pipeline.sample_arguments(chunk, sample_batch(capacity).to(self._device))

    def build(self, capacities: Sequence[Capacity]) -> None:
        """See `Runner.build`."""
        self._pipeline.build(
            [sample_batch(capacity).to(self._device) for capacity in capacities], self.slots
        )

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """See `Runner.agree_by`."""
        for graphed in self.graphed:
            control(graphed).consensus = stage
        self._pipeline.agree_on_steps(replica)

    def free_whole_steps(self) -> None:
        """See `Runner.free_whole_steps`."""
        self._pipeline.free_whole_steps()

    @property
    def step_stats(self) -> Stats | None:
        """Counts of the graphs of whole steps; None where there are none."""
        return self._pipeline.step_stats

    def close(self) -> None:
        """Frees all graphs, before the process groups go."""
        self._pipeline.close()


def _update_of(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]]) -> StepUpdate:
    """The update of a step in its graph. parameters: by chunk."""
    flat = optimizer.flat

    def before_last(chunk: int, output: Tensor) -> None:
        flat.overlap(output, parameters[chunk])

    def finish(loss: Tensor) -> Tensor:
        return torch.stack([loss, optimizer.update(loss)])

    # Between exchanges of sharded layers ranks would reduce other spans at different times.
    overlaps = flat.group is not None and not flat.shards_layers
    return StepUpdate(optimizer.zero_grad, before_last if overlaps else None, finish)


def _own_scope(chunk: nn.Module, options: GraphConfig) -> tuple[str, ...] | None:
    """The names in the scope that this chunk has a stage for; only the last one of a pipeline has a
    head."""
    if options.scope is None or not isinstance(chunk, Staged):
        return options.scope
    stages = chunk.stages()
    return tuple(
        name for name in options.scope if any(in_scope(stage.name, [name]) for stage in stages)
    )
