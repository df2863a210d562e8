"""Does the graph path compute what the eager path computes, bit by bit?

The same run is made twice in lockstep: one model runs eagerly, its twin through graphs, both on the same
microbatches and from the same random state. After every step loss, all gradients (before the update), parameters and
random states are compared. The invariant: a report without differences and with replays means that every step agreed
in every bit.

    eager:  random state E ─▶ forward, backward ─▶ update ─▶ E'
    graph:  random state G ─▶ forward, backward ─▶ update ─▶ G'      compared after each arrow
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from packgraph.diagnose.compare import Difference, first_difference
from packgraph.packing.batch import PackedBatch
from packgraph.train.executor import Executor
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import TrainConfig
from packgraph.train.random_state import random_states, set_random_states
from packgraph.train.step import accumulate, take_step
from packgraph.train.trainer import build_model

KINDS = ("loss", "gradients", "parameters", "random states")


@dataclass
class VerifyReport:
    """What was compared. differences: kind → the first difference, for kinds that differ."""

    title: str
    steps: int = 0
    microbatches: int = 0
    replayed: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether everything was equal and graphs were replayed at all."""
        return not self.differences and self.replayed > 0

    def note(self, kind: str, difference: Difference | None) -> None:
        """Keep the first difference of a kind."""
        if difference is not None:
            self.differences.setdefault(kind, difference)


class Side:
    """One of the two runs: model, optimizer, executor and its own random state."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.model = build_model(config, device)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer)
        self.executor = Executor(self.model, config.graph, device)
        torch.manual_seed(config.run.seed)
        self.random = random_states(device)

    def gradients_of(self, step: int, batches: list[PackedBatch], in_flight: bool) -> Tensor:
        """Capture if due, then forward and backward of a step. Returns its loss, float32 []."""
        set_random_states(self.random, self.device)
        self.executor.before_step(step)
        self.optimizer.zero_grad()
        loss = accumulate(self.executor.loss, batches, self.device, in_flight=in_flight)
        self.random = random_states(self.device)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """The live parameters and buffers by name."""
        return dict(self.model.state_dict())


def some_in_flight(step: int) -> bool:
    """Every third step runs all its forwards before its backwards."""
    return step % 3 == 2


def verify(title: str, config: TrainConfig, packs: Iterator[PackedBatch], device: torch.device, *,
           in_flight: Callable[[int], bool] = some_in_flight,
           budget: Callable[[int], int] | None = None) -> VerifyReport:
    """Compare `config.run.steps` steps of eager and graph training on the packs of `packs` (on the host).

    in_flight: for a step, whether all forwards run before the first backward. budget: real tokens of a step (default:
    run.tokens_per_step). Goes on after a difference of one kind, to report the first one of each.
    """
    eager = Side(replace(config, graph=replace(config.graph, enabled=False)), device)
    graph = Side(replace(config, graph=replace(config.graph, enabled=True)), device)
    report = VerifyReport(title)
    try:
        for step in range(config.run.steps):
            batches = take_step(packs, config.run.tokens_per_step if budget is None else budget(step))
            if not batches:
                break
            _compare_step(step, eager, graph, batches, in_flight(step), config, report)
            report.steps, report.microbatches = step + 1, report.microbatches + len(batches)
        totals = graph.executor.summary()
        report.replayed, report.fallbacks = totals["replayed"], totals["fallbacks"]
    finally:
        graph.executor.close()
    return report


def _compare_step(step: int, eager: Side, graph: Side, batches: list[PackedBatch], in_flight: bool,
                  config: TrainConfig, report: VerifyReport) -> None:
    losses = [side.gradients_of(step, batches, in_flight) for side in (eager, graph)]
    number = step + 1
    report.note("loss", first_difference(number, {"loss": losses[0]}, {"loss": losses[1]}))
    report.note("gradients", first_difference(number, eager.optimizer.gradients(), graph.optimizer.gradients()))
    norms = [side.optimizer.step(config.optimizer.learning_rate) for side in (eager, graph)]
    report.note("gradients", first_difference(number, {"global norm": norms[0]}, {"global norm": norms[1]}))
    report.note("parameters", first_difference(number, eager.parameters(), graph.parameters()))
    report.note("random states", first_difference(number, eager.random, graph.random))
