"""Verify a model of whose training state only one fits: the eager run first, then the graph run.

    eager run   step 1 .. n    ─▶ digests of every moment, on the host; then all its memory is freed
    graph run   step 1 .. n    ─▶ digests of the same moments, compared step by step

The invariant: the report is that of the lockstep comparison (`verify.py`), except that a difference names step, kind
and tensor, but no elements: those of the eager run are gone. What is compared and when is the same (`moments.py`), each
run begins with the same seeds and keeps its random states to itself anyway, and a step that lacks room for experts is
made again by the run that lacks it.
"""
import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from packgraph.diagnose.digest import Digest, Digester, first_digest_difference
from packgraph.diagnose.moments import Moment, Step, moments, some_in_flight, steps_of
from packgraph.diagnose.pace import SILENT, Pace
from packgraph.diagnose.side import Side
from packgraph.diagnose.verify import VerifyReport, with_graphs, without_graphs
from packgraph.parallel.mesh import Mesh
from packgraph.train.options import TrainConfig
from packgraph.train.step import Packs


def verify_apart(title: str, config: TrainConfig, open_packs: Callable[[], Packs], device: torch.device, *,
                 mesh: Mesh | None = None, in_flight: Callable[[int], bool] = some_in_flight,
                 budget: Callable[[int], int] | None = None, pace: Pace = SILENT) -> VerifyReport:
    """As `verify`, with one run in memory at a time.

    open_packs: the packs from their beginning; called once for each run, and must give the same both times.
    """
    digester, report = Digester(device), VerifyReport(title)

    def made_steps(phase: str, side: Side) -> Iterator[tuple[Step, list[Moment[Digest]]]]:
        for step in pace.of(phase, config.run.steps, steps_of(config, open_packs(), in_flight, budget)):
            yield step, digester.digests(moments(side, step, config))

    with contextlib.closing(Side(without_graphs(config), device, mesh)) as side:
        expected = [digests for _, digests in made_steps("eager run", side)]
    del side
    _free(device)
    with contextlib.closing(Side(with_graphs(config), device, mesh)) as side:
        for eager, (step, graph) in zip(expected, made_steps("graph run", side), strict=True):
            for before, now in zip(eager, graph, strict=True):
                report.compare(step, before, now, first_digest_difference)
            report.count(step)
        report.read_counts(side)
    return report


def _free(device: torch.device) -> None:
    """Give back the memory of what nothing refers to any more, also of what refers to itself."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
