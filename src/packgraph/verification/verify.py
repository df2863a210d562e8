"""Comparison of the graph path with the eager path, bit by bit.

The same run is made twice in lockstep: one model runs eagerly, its twin through graphs, both on the
same microbatches and from the same random state. After every step loss, all gradients (before the
update), parameters, buffers (such as the biases of routers; told as parameters) and random states
are compared. The invariant: a report without differences and with replays means that every step
agreed in every bit.

    eager:  random state E ─▶ forward, backward ─▶ update ─▶ E'
    graph:  random state G ─▶ forward, backward ─▶ update ─▶ G'      compared after each arrow

Both models are in memory at once. Where they do not fit, `SequentialRuns` makes one run after the
other:

    eager run   step 1 .. n    ─▶ digests of every moment, on the host; then all its memory is freed
    graph run   step 1 .. n    ─▶ digests of the same moments, compared step by step

The invariant: the report is that of the lockstep comparison, except that a difference names step,
kind and tensor, but no elements: those of the eager run are gone. What is compared and when is the
same (`compare_points`), each run begins with the same seeds and keeps its random states to itself
anyway, and a step that lacks room for experts is made again by the run that lacks it.

Of several processes each makes both runs and compares what it holds itself: its share of the loss,
the gradients that its own microbatches have added up, its parts of the parameters. What ranks send
each other is in both runs.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from packgraph.graphs.fallback import CAPTURE_FAILED
from packgraph.graphs.memory.allocator import free_memory
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import TrainConfig
from packgraph.train.data.microbatches import Packs
from packgraph.train.progress import SILENT, Phases
from packgraph.verification.compare import (
    Difference,
    Digester,
    Moment,
    first_difference,
    unequal_digests,
    unequal_elements,
)
from packgraph.verification.compared_run import (
    ComparedRun,
    Step,
    compare_points,
    some_in_flight,
    steps_of,
)


@dataclass
class VerifyReport:
    """Comparison of a graph run with an eager one. differences: kind → the first difference, for
    kinds that differ.

    rows: how many of the microbatches had which capacity, those of all ranks. made_again: how often
    a step of the graph run was made once more because experts lacked room.
    """

    title: str
    steps: int = 0
    microbatches: int = 0
    rows: Counter[Capacity] = field(default_factory=Counter)
    replayed: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    made_again: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """True if everything was equal and graphs were replayed, more often than calls were eager
        for want of one."""
        return not self.differences and self.shows

    @property
    def shows(self) -> bool:
        """True if it was graphs that were compared."""
        return self.replayed > self.fallbacks.get(CAPTURE_FAILED, 0)

    def compare(
        self,
        step: Step,
        expected: Moment,
        found: Moment,
        differs: Callable[[Any, Any], str | None] = unequal_elements,
    ) -> None:
        """Keep the first difference of every kind at a moment of both runs."""
        for kind, values in expected.items():
            difference = first_difference(step.number, values, found[kind], differs)
            if difference is not None:
                self.differences.setdefault(kind, difference)

    def count(self, step: Step) -> None:
        """Both runs have made this step."""
        self.steps, self.microbatches = step.number, self.microbatches + len(step.batches)
        self.rows.update(batch.capacity for batch in step.batches)

    def read_counts(self, graph: ComparedRun) -> None:
        """Reads what the graph run has replayed and made again."""
        totals = graph.executor.summary()
        self.replayed, self.fallbacks = totals["replayed"], totals["fallbacks"]
        self.made_again = graph.made_again


def verify(
    title: str,
    config: TrainConfig,
    packs: Packs,
    device: torch.device,
    *,
    mesh: Mesh | None = None,
    in_flight: Callable[[int], bool] = some_in_flight,
    budget: Callable[[int], int] | None = None,
    progress: Phases = SILENT,
) -> VerifyReport:
    """Compare `config.run.steps` steps of eager and graph training on the packs of `packs` (on the
    host); graphs are enabled in `config`.

    mesh: where the processes are, each of which calls this with the same packs; None = this process
    alone. in_flight: for a step, whether all forwards run before the first backward (pipelines have
    their own order). budget: real tokens of a step (default: run.tokens_per_step). progress: told
    how far it is. Goes on after a difference of one kind, to report the first one of each: those of
    this rank.
    """
    eager, graph = (
        ComparedRun(without_graphs(config), device, mesh),
        ComparedRun(config, device, mesh),
    )
    report = VerifyReport(title)
    try:
        for step in progress.of(
            title, config.run.steps, steps_of(config, packs, in_flight, budget)
        ):
            points = [compare_points(run, step, config) for run in (eager, graph)]
            for expected, found in zip(*points, strict=True):
                report.compare(step, expected, found)
            report.count(step)
        report.read_counts(graph)
    finally:
        graph.close()
        eager.close()
    return report


def without_graphs(config: TrainConfig) -> TrainConfig:
    """The same training eagerly; where layers are compiled, the compiled code that graphs are
    captured from: what is compared is capture and replay, not the compiler."""
    eager = {"warmup": config.run.steps + 1} if config.graph.compile else {"enabled": False}
    return replace(config, graph=replace(config.graph, **eager))  # type: ignore[arg-type]


Digests = list[list[Moment]]  # of every step, of its moments


def verify_sequential(
    title: str,
    config: TrainConfig,
    open_packs: Callable[[], Packs],
    device: torch.device,
    *,
    mesh: Mesh | None = None,
    in_flight: Callable[[int], bool] = some_in_flight,
    budget: Callable[[int], int] | None = None,
    progress: Phases = SILENT,
) -> VerifyReport:
    """Variant of `verify` with one run in memory at a time.

    open_packs: the packs from their beginning; called once for each run, and must give the same
    both times.
    """
    apart = SequentialRuns(open_packs, device, mesh, in_flight, budget, progress)
    return apart.graph_run(title, config, apart.eager_run(config))


@dataclass(frozen=True)
class SequentialRuns:
    """Runs on the same packs, one in memory at a time; the arguments are those of
    `verify_sequential`.

    One eager run is enough for graph runs of all granularities, with and without a stash.
    """

    open_packs: Callable[[], Packs]
    device: torch.device
    mesh: Mesh | None = None
    in_flight: Callable[[int], bool] = some_in_flight
    budget: Callable[[int], int] | None = None
    progress: Phases = SILENT

    @cached_property
    def _digester(self) -> Digester:
        return Digester(self.device)

    def eager_run(self, config: TrainConfig) -> Digests:
        """Train eagerly; what `graph_run` compares with."""
        with self._run(without_graphs(config)) as side:
            return [digests for _, digests in self._steps("eager run", side, config)]

    def graph_run(self, title: str, config: TrainConfig, expected: Digests) -> VerifyReport:
        """Train with graphs, and compare with an eager run of as many steps."""
        report = VerifyReport(title)
        with self._run(config) as side:
            for eager, (step, graph) in zip(
                expected, self._steps("graph run", side, config), strict=True
            ):
                for before, now in zip(eager, graph, strict=True):
                    report.compare(step, before, now, unequal_digests)
                report.count(step)
            report.read_counts(side)
        return report

    def _steps(
        self, phase: str, side: ComparedRun, config: TrainConfig
    ) -> Iterator[tuple[Step, list[Moment]]]:
        steps = steps_of(config, self.open_packs(), self.in_flight, self.budget)
        for step in self.progress.of(phase, config.run.steps, steps):
            yield step, self._digester.digests(compare_points(side, step, config))

    def _run(self, config: TrainConfig) -> contextlib.closing[ComparedRun]:
        """A run, where nothing is left of the one before."""
        free_memory(self.device)
        return contextlib.closing(ComparedRun(config, self.device, self.mesh))
