"""Runs the trainer's model: through captured graphs, or eagerly when graphs are off.

The first optimizer steps are real and eager. Then one sample microbatch per declared capacity is
prepared and all graphs are captured at once, largest first, so that memory is the maximum over
capacities and no step of training pays for capture.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.graphs.agreement import Consensus, alone
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.graphed import control
from packgraph.models.recompute import FULL
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.autotune import Autotune
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import GraphConfig
from packgraph.train.features.recompute import LeastRecompute
from packgraph.train.memory import (
    MemoryPlan,
    agreement,
    available_memory,
    limit_of,
    plan_memory,
)
from packgraph.train.optimizer import Optimizer
from packgraph.train.runners import GRAPHS, Runner, Ways
from packgraph.train.step import BeforeLast, StepPack


@dataclass(frozen=True)
class Counts:
    """Microbatches so far: replayed through graphs, and run eagerly for whatever reason."""

    replayed: int
    fallbacks: int

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.replayed - other.replayed, self.fallbacks - other.fallbacks)


class Preparation(Protocol):
    """Preparation of a step beside the capture, and its entry in summary.json. A call tells whether
    graphs are to be captured anew; is_final: whether no call will tell that any more; trial_steps:
    after the first capture, until a call may tell that."""

    @property
    def is_final(self) -> bool: ...

    @property
    def trial_steps(self) -> int: ...

    def __call__(self, steps_done: int) -> bool: ...

    def start_over(self, recompute: str) -> None:
        """Layers are recomputed otherwise, and no step of that was seen."""
        ...

    def summary(self) -> dict[str, Any]: ...


class Executor:
    """The life of a run's graphs: warm-up, capture within the memory budget, timing against eager,
    counts. `close` frees the graphs.

    Attributes:
        runner: Runs the microbatches of a step.
        autotune: Times graphs against eager and says which of them runs; None = graphs always.
        prepare: Called with the steps done before each step, and before anything is captured for
            it.
        memory: What graphs take, measured on trial; known when warm-up is over.
        everyone: The ranks that must capture the same, None = this one alone.
        chooses_recompute: Whether trials choose the least recomputation that fits.
        rows_differ: Whether ranks that capture together have rows of other sizes at a time.
    """

    def __init__(self, runner: Runner, options: GraphConfig, device: torch.device) -> None:
        self.runner = runner
        self.autotune: Autotune | None = None
        self.prepare: Preparation | None = None
        self.memory: MemoryPlan | None = None
        self.everyone: dist.ProcessGroup | None = None
        self.chooses_recompute = self.rows_differ = False
        self._options, self._device = options, device
        self._consensus: Consensus = alone
        self._measured = 0
        self._search: LeastRecompute | None = None
        self._put_off = 0  # steps of warm-up that it took besides

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; see `step.accumulate`."""
        return self.runner.run_step(batches, loss_tokens, before_last, self._ways())

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        """A whole optimizer step on this replica's share.

        Args:
            batches: Packs on the host.
            loss_tokens: Of the step on all replicas.
            optimizer: Always the same.
            learning_rate: Of this step.

        Returns:
            The loss, and the global gradient norm before clipping, both float32 [] on the device.

        Raises:
            CaptureError: With `strict`, if the step cannot be captured.
        """
        return self.runner.train_step(batches, loss_tokens, optimizer, learning_rate, self._ways())

    def evaluate(self, batches: Sequence[PackedBatch]) -> Tensor:
        """Forwards alone of this replica's microbatches, where gradients are off; see
        `Runner.evaluate`."""
        tuned = self.autotune if self.runner.replays else None
        return self.runner.evaluate(batches, GRAPHS.microbatch if tuned is None else tuned.chosen)

    def before_evaluation(self) -> None:
        """Captures the forwards of all rows, in evaluation mode, where ranks have different ones at
        a time: as they come, ranks would not meet to capture the same. Collective."""
        if self.rows_differ and self.runner.replays:
            for graphed in self.runner.graphed:
                samples = [self.runner.arguments(0, capacity) for capacity in self.bank()]
                graphed.build(samples, training=False)

    def _ways(self) -> Ways:
        if self.autotune is None or not self.runner.replays:
            return GRAPHS
        return self.autotune

    def before_step(self, steps_done: int) -> bool:
        """Captures all graphs if `steps_done` (of this process) is the end of warm-up, and if
        others are wanted; whether it did."""
        runner, is_first = self.runner, steps_done == self.warmup
        searches = is_first and self.chooses_recompute and not runner.replays
        if searches and self.prepare is not None and self._search is None:
            self._search = self._new_search()
            return self._search_on(self._search)
        steps = steps_done - self._put_off
        search = self._search if searches else None
        if search is not None and search.kind != FULL:
            if not self._fits_as_planned(search, steps):
                return self._search_on(search)
            changed = False
        else:
            changed = self.prepare is not None and self.prepare(steps)
        if changed and runner.replays:
            self.free_graphs(None)
        elif not self._options.enabled or not is_first:
            return False
        runner.replays = True
        if runner.captures_ahead:
            runner.build(self._within_budget())
            # Right after the capture: graphs may be given up later.
            self._measured = sum(graphed.stats.pool_bytes for graphed in runner.graphed)
        return True

    @property
    def warmup(self) -> int:
        """The steps of this process before the first capture, as far as it is known."""
        return self._options.warmup + self._put_off

    def settles_after(self) -> int:
        """The steps of this process after which the graphs that stay have been captured."""
        return self.warmup + (0 if self.prepare is None else self.prepare.trial_steps)

    def copy_streams(self, chunk: int) -> CopyStreams | None:
        """The copy streams that copy beside the work of this rank's chunk number `chunk`; None
        where there are no graphs."""
        graphed = self.runner.graphed
        return graphed[chunk].capture_backend.copy_streams if graphed else None

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """Agrees about captures by `stage`; about those of whole steps, which reach over all
        stages, by `replica`."""
        self._consensus = stage
        self.runner.agree_by(stage, replica)

    def rebuild(self) -> None:
        """Captures all graphs anew, where there are any: shapes in the model have changed. Nothing
        may be in flight."""
        if self.runner.replays:
            self.free_graphs(None)
            self.before_step(self.warmup)
            if self.autotune is not None:
                self.autotune.give_up_slower()

    def _within_budget(self) -> Sequence[Capacity]:
        """Predicts what graphs will take; the capacities to capture, largest first."""
        limit = limit_of(self._options.memory_budget, self._device)
        chosen: tuple[str, ...] = ()
        if self.chooses_recompute and self.prepare is None:
            self._search = self._new_search()
            self._search.next(self._needed, lambda _: None)
        if self._search is not None and (self.prepare is None or self.memory is None):
            chosen = (self._search.note(),)
        plan = self._plan(self._options.captured_capacities(), limit)
        self.memory = replace(plan, notes=(*chosen, *plan.notes))
        return self.memory.kept[::-1]

    def _plan(self, capacities: Sequence[Capacity], limit: int | None) -> MemoryPlan:
        return plan_memory(
            self.runner.graphed,
            self.runner.arguments,
            self.runner.slots,
            capacities,
            limit,
            agreement(self.everyone, self._device),
            self._consensus,
        )

    def _new_search(self) -> LeastRecompute:
        limit = limit_of(self._options.memory_budget, self._device)
        room = available_memory(self._device) if limit is None else limit
        return LeastRecompute(self.runner.graphed, room, agreement(self.everyone, self._device))

    def _needed(self) -> int | None:
        """Bytes of graphs of the largest capacity; None where a trial failed."""
        banks = self._plan([max(self._options.captured_capacities())], None).banks
        return sum(bank.total for bank in banks) if banks else None

    def _search_on(self, search: LeastRecompute) -> bool:
        """Leave the model with the next recomputation that fits, for one more step of warm-up, by
        which the rest is prepared. False: nothing is captured."""
        assert self.prepare is not None
        search.next(self._needed, self.prepare.start_over)
        self._put_off += 1
        return False

    def _fits_as_planned(self, search: LeastRecompute, steps_done: int) -> bool:
        """Prepare the rest; whether graphs fit with that, too."""
        assert self.prepare is not None
        try:
            self.prepare(steps_done)
        except ConfigError as error:  # on all ranks: what was asked for cannot be had so
            search.refuse("; ".join(error.problems))
            return False
        return search.fits(self._needed, " as planned")

    def tune(self, batches: Sequence[StepPack], note: Callable[[str], None]) -> bool:
        """After `before_step`: decide which way each microbatch of the step runs; whether the step
        is timed for that.

        batches: all packs of the step, those of other replicas too; see `Autotune.begin`.
        """
        is_final = self.prepare is None or self.prepare.is_final
        return (
            self.runner.replays
            and is_final
            and self.autotune is not None
            and self.autotune.begin(batches, note)
        )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Steps that are none of the run's: what is run within is not timed against eager, and
        counts are put back."""
        autotune, self.autotune = self.autotune, None
        try:
            with self.uncounted():
                yield
        finally:
            self.autotune = autotune

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts nothing that runs within, neither as replayed nor as run eagerly."""
        every = [graphed.stats for graphed in self.runner.graphed]
        counts = [(stats, stats.replayed, Counter(stats.fallbacks)) for stats in every]
        try:
            yield
        finally:
            for stats, replayed, fallbacks in counts:
                stats.replayed = replayed
                stats.fallbacks.clear()  # in place: the module counts in it, too
                stats.fallbacks.update(fallbacks)

    def bank(self) -> list[Capacity]:
        """The shapes that graphs are captured for."""
        return [
            capacity
            for capacity in self._options.captured_capacities()
            if all(capacity in graphed.capacities for graphed in self.runner.graphed)
        ]

    def tell_choices(self, choices: dict[str, dict[str, Any]]) -> None:
        """Put what was chosen between graphs and eager into the stats."""
        for graphed in self.runner.graphed:
            graphed.stats.choices.update(choices)

    def changes(self) -> tuple[int, int]:
        """Captures, and microbatches that ran eagerly, so far."""
        fallbacks = sum(sum(graphed.stats.fallbacks.values()) for graphed in self.runner.graphed)
        return self.totals()["captured"], fallbacks

    def pool_bytes(self) -> int:
        """Bytes that all pools hold."""
        whole = self.runner.step_stats
        return sum(graphed.stats.pool_bytes for graphed in self.runner.graphed) + (
            whole.pool_bytes if whole else 0
        )

    def free_graphs(self, bucket: Capacity | None) -> None:
        """Gives up the graphs of `bucket`, None = all; nothing may be under way. Its microbatches
        must run eagerly."""
        self.runner.free_whole_steps()
        for number, graphed in enumerate(self.runner.graphed):
            if bucket is None:
                control(graphed).forget_all()
            else:
                control(graphed).forget(self.runner.arguments(number, bucket))

    def counts(self) -> Counts:
        """Microbatches since the start of this process."""
        totals = self.totals()
        return Counts(totals["replayed"], sum(totals["fallbacks"].values()))

    def totals(self) -> dict[str, Any]:
        """Counts since the start of this process: captured, replayed, fallbacks {reason: count},
        capture_seconds.

        A replayed whole step counts once, whatever number of microbatches it has.
        """
        every = [graphed.stats for graphed in self.runner.graphed]
        fallbacks = sum((Counter(stats.fallbacks) for stats in every), Counter())
        if (whole := self.runner.step_stats) is not None:
            every.append(whole)
            fallbacks.update(
                {f"whole step: {reason}": count for reason, count in whole.fallbacks.items()}
            )
        return {
            "captured": sum(stats.captured for stats in every),
            "replayed": sum(stats.replayed for stats in every),
            "fallbacks": dict(fallbacks),
            "capture_seconds": sum(stats.capture_seconds for stats in every),
        }

    def summary(self) -> dict[str, Any]:
        """Graph entries of summary.json; counts and bytes are those of this process."""
        pool = {"pool_bytes": self.pool_bytes()} if self.runner.graphed else {}
        tuned = {} if self.autotune is None else self.autotune.summary()
        memory = {} if self.memory is None else {"memory": self.memory.summary(self._measured)}
        prepared = {} if self.prepare is None else self.prepare.summary()
        return {
            "backend": self.backend,
            **self.totals(),
            **pool,
            **memory,
            **tuned,
            **prepared,
            **self._compiled(),
        }

    def _compiled(self) -> dict[str, Any]:
        if not self._options.compile:
            return {}
        every = [graphed.stats for graphed in self.runner.graphed]
        return {
            "compiled": sum(stats.compiled for stats in every),
            "recompiles": dict(sum((stats.recompiles for stats in every), Counter())),
            "compile_seconds": round(sum(stats.compile_seconds for stats in every), 3),
        }

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        graphed = self.runner.graphed
        return graphed[0].backend if graphed and self._options.enabled else "eager"

    def close(self) -> None:
        """Frees all graphs and their memory, before the process groups go."""
        self.runner.close()


def add_counts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of two `Executor.totals`; an empty `before` counts as nothing."""
    if not before:
        return dict(now)
    summed = {
        name: before[name] + now[name] for name in ("captured", "replayed", "capture_seconds")
    }
    return {**summed, "fallbacks": dict(Counter(before["fallbacks"]) + Counter(now["fallbacks"]))}
