"""Does the graph path compute what the eager path computes, bit by bit?

The same run is made twice in lockstep: one model runs eagerly, its twin through graphs, both on the same
microbatches and from the same random state. After every step loss, all gradients (before the update), parameters,
buffers (such as the biases of routers; told as parameters) and random states are compared. The invariant: a report
without differences and with replays means that every step agreed in every bit.

    eager:  random state E ─▶ forward, backward ─▶ update ─▶ E'
    graph:  random state G ─▶ forward, backward ─▶ update ─▶ G'      compared after each arrow

Of several processes each makes both runs and compares what it holds itself: its share of the loss, the gradients that
its own microbatches have added up, its parts of the parameters. What ranks send each other is in both runs.
"""
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from packgraph.diagnose.compare import Difference, first_difference
from packgraph.diagnose.side import Side
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.collect import parts_of
from packgraph.parallel.mesh import Mesh
from packgraph.train.options import TrainConfig
from packgraph.train.step import Packs, take_step

LOSS, GRADIENTS, SUMMED, PARAMETERS, RANDOM = "loss", "gradients", "summed gradients", "parameters", "random states"
KINDS = (LOSS, GRADIENTS, PARAMETERS, RANDOM)
RANKS_KINDS = (LOSS, GRADIENTS, SUMMED, PARAMETERS, RANDOM)  # of several processes, in the order of comparison


@dataclass
class VerifyReport:
    """What was compared. differences: kind → the first difference, for kinds that differ.

    made_again: how often a step of the graph run was made once more because experts lacked room.
    """

    title: str
    steps: int = 0
    microbatches: int = 0
    replayed: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    made_again: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether everything was equal and graphs were replayed at all."""
        return not self.differences and self.replayed > 0

    def note(self, kind: str, difference: Difference | None) -> None:
        """Keep the first difference of a kind."""
        if difference is not None:
            self.differences.setdefault(kind, difference)


def some_in_flight(step: int) -> bool:
    """Every third step runs all its forwards before its backwards."""
    return step % 3 == 2


def verify(title: str, config: TrainConfig, packs: Packs, device: torch.device, *,
           mesh: Mesh | None = None, in_flight: Callable[[int], bool] = some_in_flight,
           budget: Callable[[int], int] | None = None) -> VerifyReport:
    """Compare `config.run.steps` steps of eager and graph training on the packs of `packs` (on the host).

    mesh: where the processes are, each of which calls this with the same packs; None = this process alone. in_flight:
    for a step, whether all forwards run before the first backward (pipelines have their own order). budget: real
    tokens of a step (default: run.tokens_per_step). Goes on after a difference of one kind, to report the first one
    of each: those of this rank.
    """
    eager = Side(_without_graphs(config), device, mesh)
    graph = Side(replace(config, graph=replace(config.graph, enabled=True)), device, mesh)
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
        report.made_again = graph.made_again
    finally:
        graph.close()
        eager.close()
    return report


def _without_graphs(config: TrainConfig) -> TrainConfig:
    """The same training eagerly; where layers are compiled, the compiled code that graphs are captured from: what is
    compared is capture and replay, not the compiler."""
    eager = {"warmup": config.run.steps + 1} if config.graph.compile else {"enabled": False}
    return replace(config, graph=replace(config.graph, **eager))  # type: ignore[arg-type]


def _compare_step(step: int, eager: Side, graph: Side, batches: list[PackedBatch], in_flight: bool,
                  config: TrainConfig, report: VerifyReport) -> None:
    number, rate = step + 1, config.optimizer.learning_rate
    if config.graph.optimizer:
        # The update is part of the graph, so gradients can be seen only as it leaves them: clipped.
        losses, norms = zip(*(side.whole_step(step, batches, rate) for side in (eager, graph)), strict=True)
        _compare_gradients(number, eager, graph, losses, report)
    else:
        losses = tuple(side.gradients_of(step, batches, in_flight) for side in (eager, graph))
        _compare_gradients(number, eager, graph, losses, report)
        norms = tuple(side.optimizer.step(rate) for side in (eager, graph))
    report.note(SUMMED if eager.mesh.world > 1 else GRADIENTS,
                first_difference(number, {"global norm": norms[0]}, {"global norm": norms[1]}))
    report.note(PARAMETERS, first_difference(number, eager.parameters(), graph.parameters()))
    report.note(RANDOM, first_difference(number, eager.random, graph.random))


def _compare_gradients(number: int, eager: Side, graph: Side, losses: tuple[Tensor, ...], report: VerifyReport) -> None:
    report.note(LOSS, first_difference(number, {"loss": losses[0]}, {"loss": losses[1]}))
    report.note(GRADIENTS, first_difference(number, eager.optimizer.gradients(), graph.optimizer.gradients()))
    if eager.mesh.world > 1:
        report.note(SUMMED, first_difference(number, _sums(eager), _sums(graph)))


def _sums(side: Side) -> dict[str, Tensor]:
    """The live memory of what this rank has of the gradients summed over ranks, by name and place."""
    return {f"{name}, from element {list(corner)} on" if any(corner) else name: part
            for name, found in side.reduced_gradients().items() for corner, part in parts_of(found)}
