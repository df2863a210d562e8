"""One of the runs that are compared, and the moments of a step at which it is.

A `ComparedRun` is what the trainer would train with, in this process, with random states of its
own. It is made of the trainer's parts and runs a step as the trainer does, at any layout: this
replica's share of the step, gradients reduced while the last backward runs, and the optimizer that
all replicas share. A step that lacks room for experts is made again with more, before anything of
it is compared.

`compare_points` says what a run holds at each moment:

    random state R ─▶ forward, backward ─▶ update ─▶ R'
                                       ▲          ▲
                     loss, gradients ──┘          └── global norm, parameters, buffers, random states

A moment is live memory, and lasts until the next one is asked for. So whoever compares does it (or
takes digests) between two moments. What is compared is decided here alone, however the runs are
made: in lockstep or one after the other (`verify.py`).
"""  # noqa: E501

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from packgraph.graphs.parameters import local_tensor
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.layers.prediction import LossSums
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.pieces import parts_of
from packgraph.parallel.tensor import dropout_seed
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.config.sections import AUTO, NONE, TrainConfig
from packgraph.train.data.microbatches import Packs, take_step
from packgraph.train.features.context import rank_tokens
from packgraph.train.features.moe import MOST_ATTEMPTS
from packgraph.train.feed import MicrobatchAssignment, count_loss_tokens
from packgraph.train.random_state import random_states, set_random_states
from packgraph.train.strategies import MicrobatchExecutor, accumulate
from packgraph.verification.compare import Moment

Made = TypeVar("Made")
# Of several processes, in the order of comparison.
RANKS_KINDS = LOSS, GRADIENTS, SUMMED, PARAMETERS, RANDOM = (
    "loss",
    "gradients",
    "summed gradients",
    "parameters",
    "random states",
)
KINDS = tuple(kind for kind in RANKS_KINDS if kind != SUMMED)  # of one process


class ComparedRun:
    """Model, optimizer, executor and random states of one run on this rank. Collective where `mesh`
    has several."""

    def __init__(self, config: TrainConfig, device: torch.device, mesh: Mesh | None = None) -> None:
        """mesh: where the processes are; None = a run of this process alone."""
        self.device, self.mesh = device, mesh or single_process()
        self.sharing = MicrobatchAssignment.of(
            self.mesh, rank_tokens(config), in_step=config.replicas_in_step
        )
        self.model = build_chunks(config, device, self.mesh)
        options = config.optimizer
        if options.resident == AUTO:  # what is left on the device is not for this run's state alone
            options = replace(options, resident=NONE)
        beside = replace(config, optimizer=options)
        self.optimizer = make_optimizer(self.model, beside, self.mesh, sums_apart=True)
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
        if in_flight and type(self.executor) is MicrobatchExecutor:
            if self.executor.rows_differ and self.executor.replays:
                # As they come, ranks would not meet to capture the same.
                self.executor.capture_rows(self.executor.bank(), len(share))
            loss = accumulate(
                self.executor.loss,
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
        """Result of `make` for this replica's share of the step, from this run's random states;
        captures if due.

        Raises RuntimeError when the step does not fit into the room for experts after several
        attempts.
        """
        self.executor.before_step(step)
        share = self.sharing.share(batches)
        for _ in range(MOST_ATTEMPTS):
            set_random_states(self.random, self.device)
            made = make(share)
            if self.optimizer.overflow is None or not self.optimizer.overflow.agree():
                self.random = random_states(self.device)
                return made
            self._make_room()
        raise RuntimeError(
            f"step {step + 1} did not fit into the room for experts {MOST_ATTEMPTS} times; give "
            "more with --parallel.expert-room"
        )

    def _make_room(self) -> None:
        """More room for experts, and nothing left of the step that lacked it. Collective."""
        assert self.optimizer.overflow is not None
        with self.executor.rebuilding():
            self.optimizer.overflow.make_room()
        for block in moe_blocks(self.model.chunks):
            block.gate.load.zero_()  # an update would do so, where there was one it has
        for sums in (
            module
            for chunk in self.model.chunks
            for module in chunk.modules()
            if isinstance(module, LossSums)
        ):
            sums.take()
        self.made_again += 1

    def parameters(self) -> dict[str, Tensor]:
        """The live memory of this rank's parameters and buffers by name, also of buffers that are
        not stored."""
        buffers = {
            name: value for chunk in self.model.chunks for name, value in chunk.named_buffers()
        }
        gathered = self.optimizer.flat.gathered()
        whole = {
            name: local_tensor(value)
            for name, value in (self.model.state_dict() | buffers).items()
            if name not in gathered
        }
        return whole | _by_place(gathered)

    def stored(self) -> dict[str, Tensor]:
        """Parameters and buffers as checkpoints hold them, by name."""
        return self.model.stored(self.optimizer.flat.gathered())

    def reduced_gradients(self) -> dict[str, Tensor]:
        """This rank's part of the gradients of the whole step, by name; to be read before the
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


@dataclass(frozen=True)
class Step:
    """A step to be made by both runs. batches: all its packs, on the host. in_flight: all forwards
    come first."""

    index: int
    batches: list[PackedBatch]
    in_flight: bool

    @property
    def number(self) -> int:
        """For people, from 1 on."""
        return self.index + 1


def some_in_flight(step: int) -> bool:
    """Every third step runs all its forwards before its backwards."""
    return step % 3 == 2


def steps_of(
    config: TrainConfig,
    packs: Packs,
    in_flight: Callable[[int], bool],
    budget: Callable[[int], int] | None,
) -> Iterator[Step]:
    """The first `config.run.steps` steps of `packs`, fewer where they end. budget: as in
    `verify`."""
    for index in range(config.run.steps):
        batches = take_step(packs, config.run.tokens_per_step if budget is None else budget(index))
        if not batches:
            return
        yield Step(index, batches, in_flight(index))


def compare_points(side: ComparedRun, step: Step, config: TrainConfig) -> Iterator[Moment]:
    """Make a step, and stop at each of its moments."""
    rate, several = config.optimizer.learning_rate, side.mesh.world > 1
    norm: Tensor | None = None
    if config.graph.optimizer:
        # The update is part of the graph, and leaves gradients as they are.
        loss, norm = side.whole_step(step.index, step.batches, rate)
    else:
        loss = side.gradients_of(step.index, step.batches, step.in_flight)
    sums = {SUMMED: _by_place(side.reduced_gradients())} if several else {}
    yield {LOSS: {"loss": loss}, GRADIENTS: _by_place(side.optimizer.gradients())} | sums
    yield {
        SUMMED if several else GRADIENTS: {
            "global norm": side.optimizer.step(rate) if norm is None else norm
        },
        PARAMETERS: side.parameters(),
        RANDOM: side.random,
    }


def _by_place(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts that this rank holds of `tensors`, by name and place."""
    return {
        f"{name}, from element {list(corner)} on" if any(corner) else name: part
        for name, found in tensors.items()
        for corner, part in parts_of(found)
    }
