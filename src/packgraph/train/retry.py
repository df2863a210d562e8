"""Steps whose numbers the host has not read yet, kept so that they can be made again.

A step that did not fit into the budgets of experts has changed nothing
(`train/features/moe.py`), and neither has what was launched after it. Made again, from the same
packs, rates and random states, with more room, they are what they would have been: the run is
bitwise one that had the room from the start.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packgraph.packing.batch import PackedBatch
from packgraph.train.executor import Executor
from packgraph.train.features.prediction import FurtherLosses
from packgraph.train.optimizer import Optimizer
from packgraph.train.random_state import random_states, set_random_states
from packgraph.train.spikes import Limits

MOST = 5  # times that one step is made; room grows to what was needed, so a second time is rare


@dataclass
class Launched:
    """A step as it was launched. share: this replica's packs. limits: of its loss and gradient
    norm. random: generators before it. made: times it was."""

    share: Sequence[PackedBatch]
    loss_tokens: int
    learning_rate: float
    limits: Limits
    random: dict[str, Tensor]
    made: int = 0


class StepRetries:
    """Launches steps and keeps those that are not `confirmed` yet, oldest first."""

    def __init__(
        self,
        executor: Executor,
        optimizer: Optimizer,
        device: torch.device,
        further: FurtherLosses | None = None,
    ) -> None:
        self._executor, self._optimizer, self._device = executor, optimizer, device
        self._further = further
        self._open: deque[Launched] = deque()
        self.total = 0  # steps that were made again

    def launch(
        self,
        share: Sequence[PackedBatch],
        loss_tokens: int,
        learning_rate: float,
        limits: Limits | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Make a step: its loss on this replica and the gradient norm, float32 [] on the device."""
        step = Launched(share, loss_tokens, learning_rate, limits or Limits(), {})
        self._open.append(step)
        return self._make(step)

    def verdicts(self, like: Tensor) -> Tensor:
        """Numbers on the device: 1 if the newest step changed nothing for want of room, else 0; the
        same because its loss or gradient norm was beyond its limits; and this rank's share of the
        losses of further tokens [D]. To be asked once for each step that was made."""
        overflow, optimizer = self._optimizer.overflow, self._optimizer
        found = torch.stack(
            [
                torch.zeros_like(like) if overflow is None else overflow.blocked,
                torch.zeros_like(like) if optimizer.guard is None else optimizer.spiked,
            ]
        )
        return found if self._further is None else torch.cat([found, self._further.take()])

    def confirm(self) -> None:
        """The oldest step is done with."""
        self._open.popleft()

    def forget(self) -> None:
        """None of the open steps counts: the run goes back to before them."""
        self._open.clear()

    def again(self) -> tuple[str, list[tuple[Tensor, Tensor, Tensor]]]:
        """Make room, capture graphs of the new shapes and make all open steps again, in order.
        Collective; waits for the device. Returns what was done, for a person, and loss, norm and
        verdicts of each.

        Raises RuntimeError when a step does not fit after several attempts.
        """
        assert self._optimizer.overflow is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._executor.free_graphs(
            None
        )  # first: they hold the old pages, for which the new ones need the memory
        told = self._optimizer.overflow.make_room(whole=self._open[0].made >= MOST - 1)
        self._executor.rebuild()
        set_random_states(self._open[0].random, self._device)
        found = []
        for step in self._open:
            if step.made >= MOST:
                raise RuntimeError(
                    f"a step did not fit into the room for experts {step.made} times ({told}); "
                    "give "
                    "more with --parallel.expert-room"
                )
            self.total += 1
            loss, norm = self._make(step)
            found.append((loss, norm, self.verdicts(loss)))
        return told, found

    def _make(self, step: Launched) -> tuple[Tensor, Tensor]:
        step.random = random_states(self._device)
        step.made += 1
        if self._optimizer.overflow is not None:
            self._optimizer.overflow.begin()
        self._optimizer.set_limits(step.limits)
        return self._executor.train_step(
            step.share, step.loss_tokens, self._optimizer, step.learning_rate
        )
