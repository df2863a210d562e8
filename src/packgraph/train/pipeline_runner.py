"""How a rank runs its part of a pipeline: by a schedule instead of a loop.

The number of slots is what the schedule needs for any number of microbatches; all graphs are
captured in them after the warm-up steps. With granularity `step` the whole schedule of this rank is
one graph where that can be.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs.cache import Consensus
from packgraph.graphs.fallback import WARM_UP, Stats, eager
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.stages import Staged, in_scope
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import make_links
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.dynamic_context import rank_rows
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import GraphConfig, TrainConfig
from packgraph.train.runner import GRAPHS, Ways, sample_batch, step_and_update
from packgraph.train.step import BeforeLast

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
        )

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
        ways: Ways = GRAPHS,
    ) -> Tensor:
        """As `Runner.run_step`.

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
        """As `Runner.train_step`."""
        return step_and_update(self, batches, loss_tokens, optimizer, learning_rate, ways)

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """As `Runner.arguments`."""
        return self._pipeline.sample_arguments(chunk, sample_batch(capacity).to(self._device))

    def build(self, capacities: Sequence[Capacity]) -> None:
        """As `Runner.build`."""
        self._pipeline.build(
            [sample_batch(capacity).to(self._device) for capacity in capacities], self.slots
        )

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """As `Runner.agree_by`."""
        for graphed in self.graphed:
            control(graphed).consensus = stage
        self._pipeline.agree_on_steps(replica)

    def free_whole_steps(self) -> None:
        """As `Runner.free_whole_steps`."""
        self._pipeline.free_whole_steps()

    @property
    def step_stats(self) -> Stats | None:
        """What graphs of whole steps have done, None where there are none."""
        return self._pipeline.step_stats

    def close(self) -> None:
        """Frees all graphs, before the process groups go."""
        self._pipeline.close()


def _own_scope(chunk: nn.Module, options: GraphConfig) -> tuple[str, ...] | None:
    """The names in the scope that this chunk has a stage for; only the last one of a pipeline has a
    head."""
    if options.scope is None or not isinstance(chunk, Staged):
        return options.scope
    stages = chunk.stages()
    return tuple(
        name for name in options.scope if any(in_scope(stage.name, [name]) for stage in stages)
    )
