"""One of the runs that are compared: what the trainer would train with, in this process, with
random states of its own.

It is made of the trainer's parts and runs a step as the trainer does, at any layout: this replica's
share of the step, gradients reduced while the last backward runs, and the optimizer that all
replicas share. A step that lacks room for experts is made again with more, before anything of it is
compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from packgraph.graphs.parameters import local_tensor
from packgraph.models.layers.moe import moe_blocks
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.tensor import dropout_seed
from packgraph.train.assignment import MicrobatchAssignment
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.dynamic_context import rank_tokens
from packgraph.train.options import TrainConfig
from packgraph.train.random_state import random_states, set_random_states
from packgraph.train.retry import MOST
from packgraph.train.runner import MicrobatchRunner
from packgraph.train.step import accumulate, count_loss_tokens

Made = TypeVar("Made")


class ComparedRun:
    """Model, optimizer, executor and random states of one run on this rank. Collective where `mesh`
    has several."""

    def __init__(self, config: TrainConfig, device: torch.device, mesh: Mesh | None = None) -> None:
        """mesh: where the processes are; None = a run of this process alone."""
        self.device, self.mesh = device, mesh or single_process()
        self.sharing = MicrobatchAssignment.of(self.mesh, rank_tokens(config))
        self.model = build_chunks(config, device, self.mesh)
        self.optimizer = make_optimizer(self.model, config, self.mesh)
        # Some steps have all their microbatches in flight.
        several = replace(config, graph=replace(config.graph, slots=None))
        self.executor = make_executor(self.model, several, device, self.mesh)
        torch.manual_seed(
            dropout_seed(config.run.seed, self.mesh, sequence=config.parallel.splits_rows)
        )
        self.random = random_states(device)
        self.made_again = 0  # steps, for want of room for experts

    def gradients_of(self, step: int, batches: Sequence[PackedBatch], in_flight: bool) -> Tensor:
        """Capture if due, forward and backward of this replica's share, then the sums of gradients
        over the ranks.

        batches: all packs of the step, on the host. in_flight: run all forwards before the first
        backward, where no schedule gives the order. Returns the share's loss, float32 [].
        """
        return self._until_it_fits(
            step, batches, lambda share: self._gradients(share, batches, in_flight)
        )

    def whole_step(
        self, step: int, batches: Sequence[PackedBatch], learning_rate: float
    ) -> tuple[Tensor, Tensor]:
        """A step with its update, as the trainer makes it: loss of the share, and global gradient
        norm, float32 []."""
        return self._until_it_fits(
            step,
            batches,
            lambda share: self.executor.train_step(
                share, count_loss_tokens(batches), self.optimizer, learning_rate
            ),
        )

    def _gradients(
        self, share: Sequence[PackedBatch], batches: Sequence[PackedBatch], in_flight: bool
    ) -> Tensor:
        self.optimizer.zero_grad()
        loss_tokens, overlap = count_loss_tokens(batches), self.optimizer.flat.overlap
        runner = self.executor.runner
        if in_flight and isinstance(runner, MicrobatchRunner):
            loss = accumulate(
                runner.loss,
                share,
                self.device,
                in_flight=True,
                loss_tokens=loss_tokens,
                before_last=overlap,
            )
        else:
            loss = self.executor.run_step(share, loss_tokens, overlap)
        # Runs that take turns must not both have reductions under way: every rank has as many as
        # its backward allowed.
        self.optimizer.flat.reduce()
        return loss

    def _until_it_fits(
        self,
        step: int,
        batches: Sequence[PackedBatch],
        make: Callable[[Sequence[PackedBatch]], Made],
    ) -> Made:
        """What `make` makes of this replica's share of the step, from this run's random states;
        captures if due.

        Raises RuntimeError when the step does not fit into the room for experts after several
        attempts.
        """
        self.executor.before_step(step)
        share = self.sharing.share(batches)
        for _ in range(MOST):
            set_random_states(self.random, self.device)
            made = make(share)
            if self.optimizer.overflow is None or not self.optimizer.overflow.agree():
                self.random = random_states(self.device)
                return made
            self._make_room()
        raise RuntimeError(
            f"step {step + 1} did not fit into the room for experts {MOST} times; give more with "
            "--parallel.expert-room"
        )

    def _make_room(self) -> None:
        """More room for experts, and nothing left of the step that lacked it. Collective."""
        assert self.optimizer.overflow is not None
        self.executor.free_graphs(
            None
        )  # first: they hold the old memory. Nothing runs: `agree` has been waited for
        self.optimizer.overflow.make_room()
        self.executor.rebuild()
        for block in moe_blocks(self.model.chunks):
            block.gate.load.zero_()  # an update would do so, where there was one it has
        self.made_again += 1

    def parameters(self) -> dict[str, Tensor]:
        """The live memory of this rank's parameters and buffers by name, also of buffers that are
        not stored."""
        buffers = {
            name: value for chunk in self.model.chunks for name, value in chunk.named_buffers()
        }
        return {
            name: local_tensor(value) for name, value in (self.model.state_dict() | buffers).items()
        }

    def reduced_gradients(self) -> dict[str, Tensor]:
        """What this rank has of the gradients of the whole step, by name; to be read before the
        optimizer's step.

        That step reduces once more, which gives the same: a reduction starts from what the
        microbatches have added up.
        """
        return {
            member.name: span.part(member, span.own_gradients)
            for span in self.optimizer.flat.spans
            for member in span.members
        }

    def close(self) -> None:
        """Free the graphs; to be called before the process groups go."""
        self.executor.close()
