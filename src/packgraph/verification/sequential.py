"""Verify a model of whose training state only one fits: the eager run first, then the graph run.

    eager run   step 1 .. n    ─▶ digests of every moment, on the host; then all its memory is freed
    graph run   step 1 .. n    ─▶ digests of the same moments, compared step by step

The invariant: the report is that of the lockstep comparison (`verify.py`), except that a difference
names step, kind and tensor, but no elements: those of the eager run are gone. What is compared and
when is the same (`compare_points.py`), each run begins with the same seeds and keeps its random
states to itself anyway, and a step that lacks room for experts is made again by the run that lacks
it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from packgraph.graphs.memory.allocator import free_memory
from packgraph.parallel.mesh import Mesh
from packgraph.train.options import TrainConfig
from packgraph.train.step import Packs
from packgraph.verification.compare_points import (
    Moment,
    Step,
    compare_points,
    some_in_flight,
    steps_of,
)
from packgraph.verification.compared_run import ComparedRun
from packgraph.verification.digest import Digest, Digester, first_digest_difference
from packgraph.verification.progress import SILENT, VerificationProgress
from packgraph.verification.verify import VerifyReport, with_graphs, without_graphs

Digests = list[list[Moment[Digest]]]  # of every step, of its moments


def verify_sequential(
    title: str,
    config: TrainConfig,
    open_packs: Callable[[], Packs],
    device: torch.device,
    *,
    mesh: Mesh | None = None,
    in_flight: Callable[[int], bool] = some_in_flight,
    budget: Callable[[int], int] | None = None,
    pace: VerificationProgress = SILENT,
) -> VerifyReport:
    """As `verify`, with one run in memory at a time.

    open_packs: the packs from their beginning; called once for each run, and must give the same
    both times.
    """
    apart = SequentialRuns(open_packs, device, mesh, in_flight, budget, pace)
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
    pace: VerificationProgress = SILENT

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
        with self._run(with_graphs(config)) as side:
            for eager, (step, graph) in zip(
                expected, self._steps("graph run", side, config), strict=True
            ):
                for before, now in zip(eager, graph, strict=True):
                    report.compare(step, before, now, first_digest_difference)
                report.count(step)
            report.read_counts(side)
        return report

    def _steps(
        self, phase: str, side: ComparedRun, config: TrainConfig
    ) -> Iterator[tuple[Step, list[Moment[Digest]]]]:
        steps = steps_of(config, self.open_packs(), self.in_flight, self.budget)
        for step in self.pace.of(phase, config.run.steps, steps):
            yield step, self._digester.digests(compare_points(side, step, config))

    def _run(self, config: TrainConfig) -> contextlib.closing[ComparedRun]:
        """A run, where nothing is left of the one before."""
        free_memory(self.device)
        return contextlib.closing(ComparedRun(config, self.device, self.mesh))
