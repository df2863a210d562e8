"""Runs whole steps and their updates as one graph.

    [zero  F0 B0  F1 B1  ...  reduce  clip  AdamW]      one launch; reads the learning rate from
                                                        device memory

What changes from step to step is device data: documents, label count and learning rate are copied
in before the replay, the optimizer's own step number is advanced by the graph. Betas, eps, weight
decay and the clipping norm are constants of a run, so they may be baked. A step whose shapes are
not in the bank runs by graphs of its microbatches, and the same update follows eagerly; it is
counted with its reason.

Replicas reduce inside the graph: spans leave while the last backward still runs. Sharded layers are
exchanged as in graphs of chunks; all else is reduced behind the last backward then, since a rank
that runs eagerly beside replays has to send the same things in the same order over one group.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs import fallback
from packgraph.graphs.agreement import Consensus, alone
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import Stats, eager
from packgraph.graphs.graphed import GraphedModule
from packgraph.graphs.key import undeclared
from packgraph.graphs.stages import Staged
from packgraph.graphs.step import GraphedStep
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.pipeline.executor import Around
from packgraph.train.config.sections import GraphConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.runners import GRAPHS, MicrobatchRunner, Ways
from packgraph.train.step import BeforeLast


class StepRunner:
    """Runs whole steps of a model that is not cut into stages, by one process, or by ranks that
    have as many microbatches of the same capacities; a `Runner`.

    A step that cannot be one graph runs by graphs of its microbatches.
    """

    captures_ahead = False

    def __init__(self, model: nn.Module, options: GraphConfig, device: torch.device) -> None:
        self._model, self._options, self._device = model, options, device
        self._microbatches = MicrobatchRunner(model, replace(options, granularity="chunk"), device)
        self._whole: GraphedStep | None = None
        self._consensus: Consensus = alone
        self._exchanges = False  # with other ranks, while the model runs

    @property
    def replays(self) -> bool:
        """True if warm-up is over."""
        return self._microbatches.replays

    @replays.setter
    def replays(self, replays: bool) -> None:
        self._microbatches.replays = replays

    @property
    def graphed(self) -> Sequence[GraphedModule]:
        """The model with graphs of microbatches."""
        return self._microbatches.graphed

    @property
    def slots(self) -> Sequence[int]:
        """See `Runner.slots`."""
        return self._microbatches.slots

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """See `Runner.arguments`."""
        return self._microbatches.arguments(chunk, capacity)

    def build(self, capacities: Sequence[Capacity]) -> None:
        """See `Runner.build`."""
        self._microbatches.build(capacities)

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
        ways: Ways = GRAPHS,
    ) -> Tensor:
        """See `Runner.run_step`; by graphs of microbatches."""
        return self._microbatches.run_step(batches, loss_tokens, before_last)

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
        ways: Ways = GRAPHS,
    ) -> tuple[Tensor, Tensor]:
        """See `Runner.train_step`; in one replay where the step's shapes are in the bank.

        Raises:
            CaptureError: With `strict`, if the step cannot be captured.
        """
        by_microbatch = partial(
            self._microbatches.train_step, batches, loss_tokens, optimizer, learning_rate
        )
        if not self.replays or not batches:
            return by_microbatch()
        if self._whole is None:
            self._whole = self._graphed_step(optimizer)
        whole = self._whole
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        with ways.step(batches):
            if fallback.bypass_reason() is not None:
                return by_microbatch()
            uploaded = [batch.to(self._device) for batch in batches]
            if isinstance(self._model, Staged):
                # May refuse what the host alone knows, and a graph would not.
                for batch in uploaded:
                    self._model.begin(batch, tokens_in_step)
            reason = self._reason_against(whole, tokens_in_step, uploaded)
            if reason is not None:
                whole.stats.fallbacks[reason] += 1
                if self._exchanges and whole.others_replay(tokens_in_step, *uploaded):
                    with eager(reason):  # a capture would exchange more than the others do
                        return by_microbatch()
                return by_microbatch()
            optimizer.set_learning_rate(learning_rate)
            loss, norm = whole.replay(tokens_in_step, *uploaded).unbind()
            return loss, norm

    def evaluate(self, batches: Sequence[PackedBatch], around: Around) -> Tensor:
        """See `Runner.evaluate`; by graphs of microbatches."""
        return self._microbatches.evaluate(batches, around)

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """See `Runner.agree_by`."""
        self._microbatches.agree_by(stage, replica)
        self._consensus, self._exchanges = replica, stage is not alone

    def free_whole_steps(self) -> None:
        """See `Runner.free_whole_steps`."""
        if self._whole is not None:
            self._whole.close()

    @property
    def step_stats(self) -> Stats | None:
        """Counts of graphs of whole steps, None before the first."""
        return None if self._whole is None else self._whole.stats

    def close(self) -> None:
        """See `Runner.close`."""
        self.free_whole_steps()
        self._microbatches.close()

    def _graphed_step(self, optimizer: Optimizer) -> GraphedStep:
        # Nothing of ours: that would be a cycle, with the model in it.
        (graphed,), device = self.graphed, self._device

        # Between exchanges of sharded layers ranks would reduce other spans at different times.
        overlaps = optimizer.flat.group is not None and not optimizer.flat.shards_layers

        # Microbatch by microbatch, as by their graphs.
        def run(tokens_in_step: Tensor, *batches: PackedBatch, is_dry_run: bool) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float32, device=device)
            for number, batch in enumerate(batches):
                loss = graphed.run_eagerly(batch, tokens_in_step)
                total += loss.detach()
                if overlaps and not is_dry_run and number == len(batches) - 1:
                    optimizer.flat.overlap(loss)
                loss.backward()
            return total

        def finish(total: Tensor) -> Tensor:
            return torch.stack([total, optimizer.update(total)])

        made = GraphedStep(
            [self._model],
            run,
            graphed.capture_backend,
            device,
            compiled=graphed.compiles,
            finish=finish,
        )
        made.consensus = self._consensus
        return made

    def _reason_against(
        self, whole: GraphedStep, tokens_in_step: Tensor, batches: Sequence[PackedBatch]
    ) -> str | None:
        """Reason why this step cannot be a replay, or None; captures it if it is new."""
        reason = undeclared((tokens_in_step, *batches), {}, self._options.captured_capacities())
        if reason is not None:
            return reason
        try:
            return whole.reason_against(tokens_in_step, *batches)
        except CaptureError as error:
            if self._options.strict:
                raise
            warnings.warn(
                "this step runs by its microbatches' graphs, because it cannot be one graph: "
                f"{error}",
                PackgraphWarning,
                stacklevel=4,
            )
            return fallback.CAPTURE_FAILED
