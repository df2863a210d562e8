"""A whole optimizer step in one graph: zeroed gradients, forward and backward of all microbatches,
clipping, AdamW.

    [zero  F0 B0  F1 B1  ...  reduce  clip  AdamW]      one launch; reads the learning rate from
                                                        device memory

What changes from step to step is device data: documents, label count and learning rate are copied
in before the replay, the optimizer's own step number is advanced by the graph. Betas, eps, weight
decay and the clipping norm are constants of a run, so they may be baked. A step whose shapes are
not in the bank runs by graphs of its microbatches, and the same update follows eagerly; it is
counted with its reason.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from packgraph.graphs import fallback
from packgraph.graphs.cache import Consensus, alone
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import Stats
from packgraph.graphs.signature import undeclared
from packgraph.graphs.stages import Staged
from packgraph.graphs.step import GraphedStep
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.executor import Executor
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import GraphConfig


class StepExecutor(Executor):
    """Runs whole steps of a model that is not cut into stages, by one process or by ranks that see
    the same packs."""

    def __init__(self, model: nn.Module, options: GraphConfig, device: torch.device) -> None:
        super().__init__(model, replace(options, granularity="chunk"), device)
        self._whole: GraphedStep | None = None
        self._whole_vote: Consensus = alone

    def vote_by(self, stage: Consensus, replica: Consensus) -> None:
        """As Executor's."""
        super().vote_by(stage, replica)
        self._whole_vote = replica

    def before_step(self, steps_done: int) -> bool:
        """Whether `steps_done` is the end of warm-up, or others are wanted. Graphs are captured
        when a step needs them."""
        if not self.begin_step(steps_done):
            return False
        self._warm = True
        return True

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        """As Executor's, in one replay where the step's shapes are in the bank. Always with the
        same optimizer.

        With `strict` a step that cannot be captured raises CaptureError.
        """
        if not self._warm or not batches:
            return super().train_step(batches, loss_tokens, optimizer, learning_rate)
        if self._whole is None:
            self._whole = self._graphed_step(optimizer)
        with self._way_of_step(batches):
            if fallback.bypass_reason() is not None:
                return super().train_step(batches, loss_tokens, optimizer, learning_rate)
            return self._by_graphs(self._whole, batches, loss_tokens, optimizer, learning_rate)

    def _by_graphs(
        self,
        whole: GraphedStep,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        uploaded = [batch.to(self._device) for batch in batches]
        if isinstance(self._model, Staged):
            for batch in uploaded:
                self._model.begin(
                    batch, tokens_in_step
                )  # may refuse what the host alone knows, and a graph would not
        reason = self._reason_against(whole, tokens_in_step, uploaded)
        if reason is not None:
            whole.stats.fallbacks[reason] += 1
            return super().train_step(batches, loss_tokens, optimizer, learning_rate)
        optimizer.set_learning_rate(learning_rate)
        loss, norm = whole(tokens_in_step, *uploaded).unbind()
        return loss, norm

    def free_graphs(self, bucket: Capacity | None) -> None:
        """As Executor's."""
        super().free_graphs(bucket)
        if self._whole is not None:
            self._whole.close()

    def step_stats(self) -> Stats | None:
        """What graphs of whole steps have done, None before the first."""
        return None if self._whole is None else self._whole.stats

    def close(self) -> None:
        """Free all graphs and their memory."""
        if self._whole is not None:
            self._whole.close()
        super().close()

    def _graphed_step(self, optimizer: Optimizer) -> GraphedStep:
        (graphed,), device = (
            self._graphed,
            self._device,
        )  # nothing of ours: that would be a cycle, with the model in it

        def run(tokens_in_step: Tensor, *batches: PackedBatch) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float32, device=device)
            for batch in batches:
                loss = graphed.run_eagerly(batch, tokens_in_step)
                total += loss.detach()
                loss.backward()
            return torch.stack([total, optimizer.update(total)])

        made = GraphedStep(
            [self._model], run, graphed.capture_backend, device, compiled=graphed.compiles
        )
        made.consensus = self._whole_vote
        return made

    def _reason_against(
        self, whole: GraphedStep, tokens_in_step: Tensor, batches: Sequence[PackedBatch]
    ) -> str | None:
        """Why this step cannot be a replay, or None; captures it if it is new."""
        reason = undeclared((tokens_in_step, *batches), {}, self._options.captured_capacities())
        if reason is not None:
            return reason
        try:
            return None if whole.ready(tokens_in_step, *batches) else fallback.TOO_MANY_KEYS
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
