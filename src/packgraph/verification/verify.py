"""Does the graph path compute what the eager path computes, bit by bit?

The same run is made twice in lockstep: one model runs eagerly, its twin through graphs, both on the
same microbatches and from the same random state. After every step loss, all gradients (before the
update), parameters, buffers (such as the biases of routers; told as parameters) and random states
are compared. The invariant: a report without differences and with replays means that every step
agreed in every bit.

    eager:  random state E ─▶ forward, backward ─▶ update ─▶ E'
    graph:  random state G ─▶ forward, backward ─▶ update ─▶ G'      compared after each arrow

Both models are in memory at once; where they do not fit, `sequential.py` makes one run after the
other.

Of several processes each makes both runs and compares what it holds itself: its share of the loss,
the gradients that its own microbatches have added up, its parts of the parameters. What ranks send
each other is in both runs.

`VerificationProgress` says how far a verification is to whoever waits for it:

    eager run: step 40 of 100, 17 s       at most one such line in `SECONDS`, when a step is done
    eager run: 100 steps in 53 s          when a phase ends that took so long

The invariant: a phase that takes less than `SECONDS` says nothing, and what is said changes nothing
of what is made.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from packgraph.graphs.fallback import CAPTURE_FAILED
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import TrainConfig
from packgraph.train.feed import Packs
from packgraph.verification.compare import Difference, first_difference
from packgraph.verification.compared_run import (
    ComparedRun,
    Held,
    Moment,
    Step,
    compare_points,
    some_in_flight,
    steps_of,
)

SECONDS = 10.0
Made = TypeVar("Made")


@dataclass(frozen=True)
class VerificationProgress:
    """Watches phases. tell: takes a line of text. now: a clock, in seconds. every: seconds between
    two lines."""

    tell: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    every: float = SECONDS

    def of(self, phase: str, total: int, steps: Iterable[Made]) -> Iterator[Made]:
        """`steps` as they are, at most `total` of them; one is done when the next is asked for.

        phase: its name, empty where there is nothing to tell it from. Seconds count from where the
        first step is begun.
        """
        name = f"{phase}: " if phase else ""
        began = told = self.now()
        done = 0
        for step in steps:
            yield step
            done, now = done + 1, self.now()
            if now - told >= self.every and done < total:
                self.tell(f"{name}step {done} of {total}, {now - began:.0f} s")
                told = now
        seconds = self.now() - began
        if seconds >= self.every:
            self.tell(f"{name}{done} step{'s' * (done != 1)} in {seconds:.0f} s")


SILENT = VerificationProgress(lambda text: None)


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
        expected: Moment[Held],
        found: Moment[Held],
        first: Callable[[int, Mapping[str, Held], Mapping[str, Held]], Difference | None],
    ) -> None:
        """Keep the first difference of every kind at a moment of both runs, as `first` finds it."""
        for kind, values in expected.items():
            difference = first(step.number, values, found[kind])
            if difference is not None:
                self.differences.setdefault(kind, difference)

    def count(self, step: Step) -> None:
        """Both runs have made this step."""
        self.steps, self.microbatches = step.number, self.microbatches + len(step.batches)
        self.rows.update(batch.capacity for batch in step.batches)

    def read_counts(self, graph: ComparedRun) -> None:
        """Reads what the graph run has replayed and made again."""
        totals = graph.executor.summary()
        self.replayed, self.fallbacks, self.made_again = (
            totals["replayed"],
            totals["fallbacks"],
            graph.made_again,
        )


def verify(
    title: str,
    config: TrainConfig,
    packs: Packs,
    device: torch.device,
    *,
    mesh: Mesh | None = None,
    in_flight: Callable[[int], bool] = some_in_flight,
    budget: Callable[[int], int] | None = None,
    progress: VerificationProgress = SILENT,
) -> VerifyReport:
    """Compare `config.run.steps` steps of eager and graph training on the packs of `packs` (on the
    host).

    mesh: where the processes are, each of which calls this with the same packs; None = this process
    alone. in_flight: for a step, whether all forwards run before the first backward (pipelines have
    their own order). budget: real tokens of a step (default: run.tokens_per_step). progress: told
    how far it is. Goes on after a difference of one kind, to report the first one of each: those of
    this rank.
    """
    eager, graph = (
        ComparedRun(without_graphs(config), device, mesh),
        ComparedRun(with_graphs(config), device, mesh),
    )
    report = VerifyReport(title)
    try:
        for step in progress.of("", config.run.steps, steps_of(config, packs, in_flight, budget)):
            points = [compare_points(run, step, config) for run in (eager, graph)]
            for expected, found in zip(*points, strict=True):
                report.compare(step, expected, found, first_difference)
            report.count(step)
        report.read_counts(graph)
    finally:
        graph.close()
        eager.close()
    return report


def with_graphs(config: TrainConfig) -> TrainConfig:
    """The training of the graph run."""
    return replace(config, graph=replace(config.graph, enabled=True))


def without_graphs(config: TrainConfig) -> TrainConfig:
    """The same training eagerly; where layers are compiled, the compiled code that graphs are
    captured from: what is compared is capture and replay, not the compiler."""
    eager = {"warmup": config.run.steps + 1} if config.graph.compile else {"enabled": False}
    return replace(config, graph=replace(config.graph, **eager))  # type: ignore[arg-type]
