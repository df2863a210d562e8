"""The moments of a step at which two runs are compared, and what a run holds at each of them.

    random state R ─▶ forward, backward ─▶ update ─▶ R'
                                       ▲          ▲
                     loss, gradients ──┘          └── global norm, parameters, buffers, random states

A moment is live memory, and lasts until the next one is asked for: the update clips gradients in
place. So whoever compares does it (or takes digests) between two moments. What is compared is
decided here alone, however the runs are made: in lockstep (`verify.py`) or one after the other
(`apart.py`).
"""  # noqa: E501

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from packgraph.packing.batch import PackedBatch
from packgraph.parallel.pieces import parts_of
from packgraph.train.options import TrainConfig
from packgraph.train.step import Packs, take_step
from packgraph.verification.compared_run import ComparedRun

LOSS, GRADIENTS, SUMMED, PARAMETERS, RANDOM = (
    "loss",
    "gradients",
    "summed gradients",
    "parameters",
    "random states",
)
KINDS = (LOSS, GRADIENTS, PARAMETERS, RANDOM)
RANKS_KINDS = (
    LOSS,
    GRADIENTS,
    SUMMED,
    PARAMETERS,
    RANDOM,
)  # of several processes, in the order of comparison

Held = TypeVar("Held")
Moment = Mapping[str, Mapping[str, Held]]  # kind -> name -> a tensor, or its digest


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


def compare_points(side: ComparedRun, step: Step, config: TrainConfig) -> Iterator[Moment[Tensor]]:
    """Make a step, and stop at each of its moments."""
    rate, several = config.optimizer.learning_rate, side.mesh.world > 1
    if config.graph.optimizer:
        # The update is part of the graph, so gradients can be seen only as it leaves them: clipped.
        loss, norm = side.whole_step(step.index, step.batches, rate)
        yield _before_update(side, loss)
    else:
        yield _before_update(side, side.gradients_of(step.index, step.batches, step.in_flight))
        norm = side.optimizer.step(rate)
    yield {
        SUMMED if several else GRADIENTS: {"global norm": norm},
        PARAMETERS: side.parameters(),
        RANDOM: side.random,
    }


def _before_update(side: ComparedRun, loss: Tensor) -> Moment[Tensor]:
    found = {LOSS: {"loss": loss}, GRADIENTS: side.optimizer.gradients()}
    return found | {SUMMED: _sums(side)} if side.mesh.world > 1 else found


def _sums(side: ComparedRun) -> dict[str, Tensor]:
    """The live memory of what this rank has of the gradients summed over ranks, by name and
    place."""
    return {
        f"{name}, from element {list(corner)} on" if any(corner) else name: part
        for name, found in side.reduced_gradients().items()
        for corner, part in parts_of(found)
    }
