"""How the trainer runs its part of a pipeline: the same life as `Executor`, with a schedule instead
of a loop.

The number of slots is what the schedule needs for any number of microbatches; all graphs are
captured in them after the warm-up steps. With granularity `step` the whole schedule of this rank is
one graph where that can be.
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from packgraph.graphs.cache import Consensus
from packgraph.graphs.fallback import WARM_UP, Stats, eager
from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Staged, in_scope
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import make_links
from packgraph.parallel.pipeline.slots import slot_counts
from packgraph.train.dynamic_context import rank_rows
from packgraph.train.executor import Executor, sample_batch
from packgraph.train.options import GraphConfig, TrainConfig
from packgraph.train.step import BeforeLast

OFF = "graphs are off"


class StageExecutor(Executor):
    """Runs this rank's chunks of a pipeline. Collective: every rank of the pipeline runs the same
    steps."""

    def __init__(
        self, chunks: Sequence[nn.Module], config: TrainConfig, device: torch.device, mesh: Mesh
    ) -> None:
        """chunks: this rank's part of the model, in the order of its stages."""
        options = config.graph
        self._options, self._device = options, device
        self._warm = False
        links = make_links(mesh)
        self._slots = slot_counts(links.size, len(chunks))[links.rank]
        self._graphed = [
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
            for chunk, slots in zip(chunks, self._slots, strict=True)
        ]
        self._parameters = [list(chunk.parameters()) for chunk in chunks]
        self._pipeline = Pipeline(
            self._graphed,
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
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; see `step.accumulate`.

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
        with self._bypass(), self._way_of_step(batches):
            return self._pipeline.step(
                uploaded, tokens_in_step, None if before_last is None else settle
            )

    def _bypass(self) -> contextlib.AbstractContextManager[None]:
        if not self._options.enabled:
            return eager(OFF)
        return contextlib.nullcontext() if self._warm else eager(WARM_UP)

    def before_step(self, steps_done: int) -> bool:
        """Capture all graphs when `steps_done` is the end of warm-up, and where others are wanted;
        whether it did."""
        if not self.begin_step(steps_done):
            return False
        self._warm = True

        def arguments(chunk: int, capacity: Capacity) -> tuple[object, ...]:
            return self._pipeline.sample_arguments(chunk, sample_batch(capacity).to(self._device))

        capacities = self._within_budget(arguments, self._slots)
        self._pipeline.build(
            [sample_batch(capacity).to(self._device) for capacity in capacities], self._slots
        )
        self._measure()
        return True

    def vote_by(self, stage: Consensus, replica: Consensus) -> None:
        """As Executor's."""
        super().vote_by(stage, replica)
        self._pipeline.vote_on_steps(replica)

    def free_graphs(self, bucket: Capacity | None) -> None:
        """As Executor's."""
        super().free_graphs(bucket)
        self._pipeline.free_whole_steps()

    def step_stats(self) -> Stats | None:
        """What graphs of whole steps have done, None where there are none."""
        return self._pipeline.step_stats

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return super().backend if self._options.enabled else "eager"

    def close(self) -> None:
        """Free all graphs, before the process groups go."""
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
