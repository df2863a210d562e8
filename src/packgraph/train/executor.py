"""How the trainer runs its model: through captured graphs, or eagerly when graphs are off.

The first optimizer steps are real and eager. Then one sample microbatch per declared capacity is
prepared and all graphs are captured at once, largest first, so that memory is the maximum over
capacities and no step of training pays for capture.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.graphs.cache import Consensus, alone
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.fallback import WARM_UP, Stats, eager
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.graphs.microbatch import forward_backward
from packgraph.graphs.profiler_ranges import profiler_range
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.autotune import Autotune
from packgraph.train.memory_budget import Arguments, MemoryPlan, agreement, limit_of, plan_memory
from packgraph.train.optimizer import Optimizer
from packgraph.train.options import GraphConfig
from packgraph.train.step import BeforeLast, accumulate


@dataclass(frozen=True)
class Counts:
    """Microbatches so far: replayed through graphs, and run eagerly for whatever reason."""

    replayed: int
    fallbacks: int


class Preparation(Protocol):
    """What else has to be ready before a step, and what it says of itself in summary.json. A call
    tells whether graphs are to be captured anew; is_final: whether no call will tell that any more;
    trial_steps: after the first capture, until a call may tell that."""

    @property
    def is_final(self) -> bool: ...

    @property
    def trial_steps(self) -> int: ...

    def __call__(self, steps_done: int) -> bool: ...

    def summary(self) -> dict[str, Any]: ...


class Executor:
    """Runs microbatches of one model. `close` frees the graphs.

    autotune: times graphs against eager and says which of them runs; None = graphs always. prepare:
    called with the steps done before each step, and before anything is captured for it.
    """

    autotune: Autotune | None = None
    prepare: Preparation | None = None

    memory: MemoryPlan | None = (
        None  # what graphs take, by a prediction; known when warm-up is over
    )
    _measured = 0
    everyone: dist.ProcessGroup | None = (
        None  # the ranks that must capture the same, None = this one alone
    )
    _vote: Consensus = staticmethod(alone)

    def __init__(self, model: nn.Module, options: GraphConfig, device: torch.device) -> None:
        self._model = model
        self._options = options
        self._device = device
        self._warm = False
        self._graphed: list[GraphedModule] = []
        if options.enabled:
            # One call of warm-up shows which outputs get gradients; the rest of the warm-up steps
            # is counted below.
            self._graphed = [
                graph(
                    model,
                    capacities=options.captured_capacities(),
                    backend=options.backend,
                    warmup=1,
                    slots=options.slots,
                    strict=options.strict,
                    scope=options.scope,
                    granularity=options.granularity,
                    compile=options.compile,
                )
            ]

    def loss(self, batch: PackedBatch, tokens_in_step: Tensor) -> Tensor:
        """Loss of one microbatch on the device, float32 []: its sum of token losses /
        tokens_in_step (int64 [])."""
        if not self._graphed:
            return self._model(batch, tokens_in_step)
        (graphed,) = self._graphed
        if self._warm or not graphed.stats.fallbacks:
            return graphed(batch, tokens_in_step)
        with eager(WARM_UP):
            return graphed(batch, tokens_in_step)

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; see `step.accumulate`."""
        if not self._graphed or not self._warm:
            return accumulate(
                self.loss, batches, self._device, loss_tokens=loss_tokens, before_last=before_last
            )
        (graphed,) = self._graphed
        tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=self._device)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        with graphed.frozen():
            for number, batch in enumerate(batches):
                before = before_last if number == len(batches) - 1 else None
                with self._way_of(batch), profiler_range("microbatch", number, batch.capacity):
                    total += forward_backward(
                        graphed, batch.to(self._device), tokens_in_step, before=before
                    )
        return total

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        """A whole optimizer step on this replica's share: its loss, and the global gradient norm
        before clipping.

        batches: packs on the host. loss_tokens: of the step on all replicas. Both results are
        float32 [] on the device.
        """
        optimizer.zero_grad()
        loss = self.run_step(
            batches,
            loss_tokens,
            optimizer.flat.overlap if optimizer.flat.group is not None else None,
        )
        return loss, optimizer.step(learning_rate, loss)

    def before_step(self, steps_done: int) -> bool:
        """Capture all graphs when `steps_done` (of this process) is the end of warm-up, and where
        others are wanted; whether it did."""
        if not self.begin_step(steps_done):
            return False
        self._warm = True
        tokens_in_step = torch.ones((), dtype=torch.int64, device=self._device)

        def arguments(chunk: int, capacity: Capacity) -> tuple[Any, ...]:
            return sample_batch(capacity).to(self._device), tokens_in_step

        capacities = self._within_budget(arguments, [self._options.slots or 1])
        self._graphed[0].build([arguments(0, capacity) for capacity in capacities])
        self._measure()
        return True

    def begin_step(self, steps_done: int) -> bool:
        """A step begins; whether graphs are due: at the end of warm-up, and where others are
        wanted."""
        if self.prepare is not None and self.prepare(steps_done) and self._warm:
            self.free_graphs(None)
            return True
        return self._options.enabled and steps_done == self._options.warmup

    def settles_after(self) -> int:
        """The steps of this process after which the graphs that stay have been captured."""
        return self._options.warmup + (0 if self.prepare is None else self.prepare.trial_steps)

    def lanes(self, chunk: int) -> CopyStreams | None:
        """The lanes that copy beside the work of this rank's chunk number `chunk`; None where there
        are no graphs."""
        return self._graphed[chunk].capture_backend.lanes if self._graphed else None

    def vote_by(self, stage: Consensus, replica: Consensus) -> None:
        """Agree about captures by `stage`; about those of whole steps, which reach over all stages,
        by `replica`."""
        self._vote = stage
        for graphed in self._graphed:
            control(graphed).consensus = stage

    def rebuild(self) -> None:
        """Capture all graphs anew, where there are any: shapes in the model have changed. Nothing
        may be in flight."""
        if self._warm:
            self.free_graphs(None)
            self.before_step(self._options.warmup)
            if self.autotune is not None:
                self.autotune.give_up_slower()

    def _within_budget(self, arguments: Arguments, slots: Sequence[int]) -> Sequence[Capacity]:
        """Predict what graphs will take; the capacities to capture, largest first."""
        agree = agreement(self.everyone, self._device)
        self.memory = plan_memory(
            self._graphed,
            arguments,
            slots,
            self._options.captured_capacities(),
            limit_of(self._options.memory_budget, self._device),
            agree,
            self._vote,
        )
        return self.memory.kept[::-1]

    def _measure(self) -> None:
        """Note what the pools take right after the capture; graphs may be given up later."""
        self._measured = sum(graphed.stats.pool_bytes for graphed in self._graphed)

    def tune(self, batches: Sequence[PackedBatch], note: Callable[[str], None]) -> bool:
        """After `before_step`: decide which way each microbatch of the step runs; whether the step
        is timed for that.

        batches: all packs of the step, those of other replicas too; see `Autotune.begin`.
        """
        is_final = self.prepare is None or self.prepare.is_final
        return (
            self._warm
            and is_final
            and self.autotune is not None
            and self.autotune.begin(batches, note)
        )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Steps that are none of the run's: what is run within is not timed against eager, and
        counts are put back."""
        autotune, self.autotune = self.autotune, None
        every = [graphed.stats for graphed in self._graphed]
        counts = [(stats, stats.replayed, Counter(stats.fallbacks)) for stats in every]
        try:
            yield
        finally:
            self.autotune = autotune
            for stats, replayed, fallbacks in counts:
                stats.replayed, stats.fallbacks = replayed, fallbacks

    def _way_of(self, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
        if self.autotune is None or self.autotune.whole_steps:
            return contextlib.nullcontext()
        return self.autotune.microbatch(batch)

    def _way_of_step(
        self, batches: Sequence[PackedBatch]
    ) -> contextlib.AbstractContextManager[None]:
        if self.autotune is None or not self._warm:
            return contextlib.nullcontext()
        return self.autotune.step(batches)

    def bank(self) -> list[Capacity]:
        """The shapes that graphs are captured for."""
        return [
            capacity
            for capacity in self._options.captured_capacities()
            if all(capacity in graphed.capacities for graphed in self._graphed)
        ]

    def tell_choices(self, choices: dict[str, dict[str, Any]]) -> None:
        """Put what was chosen between graphs and eager into the stats."""
        for graphed in self._graphed:
            graphed.stats.choices.update(choices)

    def changes(self) -> tuple[int, int]:
        """Captures, and microbatches that ran eagerly, so far."""
        fallbacks = sum(sum(graphed.stats.fallbacks.values()) for graphed in self._graphed)
        return self.totals()["captured"], fallbacks

    def pool_bytes(self) -> int:
        """Bytes that all pools hold."""
        whole = self.step_stats()
        return sum(graphed.stats.pool_bytes for graphed in self._graphed) + (
            whole.pool_bytes if whole else 0
        )

    def free_graphs(self, bucket: Capacity | None) -> None:
        """Give up the graphs of `bucket`, None = all; nothing may be under way. Its microbatches
        must run eagerly."""
        if bucket is None:
            for graphed in self._graphed:
                control(graphed).forget_all()
            return
        arguments = (
            sample_batch(bucket).to(self._device),
            torch.ones((), dtype=torch.int64, device=self._device),
        )
        for graphed in self._graphed:
            control(graphed).forget(arguments)

    def counts(self) -> Counts:
        """Microbatches since the start of this process."""
        totals = self.totals()
        return Counts(totals["replayed"], sum(totals["fallbacks"].values()))

    def totals(self) -> dict[str, Any]:
        """Counts since the start of this process: captured, replayed, fallbacks {reason: count},
        capture_seconds.

        A replayed whole step counts once, whatever number of microbatches it has.
        """
        every = [graphed.stats for graphed in self._graphed]
        fallbacks = sum((Counter(stats.fallbacks) for stats in every), Counter())
        if (whole := self.step_stats()) is not None:
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

    def step_stats(self) -> Stats | None:
        """What graphs of whole steps have done, None where there are none."""
        return None

    def summary(self) -> dict[str, Any]:
        """What summary.json says about graphs; counts and bytes are those of this process."""
        pool = {"pool_bytes": self.pool_bytes()} if self._graphed else {}
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
        every = [graphed.stats for graphed in self._graphed]
        return {
            "compiled": sum(stats.compiled for stats in every),
            "recompiles": dict(sum((stats.recompiles for stats in every), Counter())),
            "compile_seconds": round(sum(stats.compile_seconds for stats in every), 3),
        }

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._graphed[0].backend if self._graphed else "eager"

    def close(self) -> None:
        """Free all graphs and their memory."""
        for graphed in self._graphed:
            graphed.close()


def add_counts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of two `Executor.totals`; an empty `before` counts as nothing."""
    if not before:
        return dict(now)
    summed = {
        name: before[name] + now[name] for name in ("captured", "replayed", "capture_seconds")
    }
    return {**summed, "fallbacks": dict(Counter(before["fallbacks"]) + Counter(now["fallbacks"]))}


def sample_batch(capacity: Capacity) -> PackedBatch:
    """A valid microbatch of one document of token 0, for capture: only its shapes matter.

    One of half the row fits however documents are padded; two halves do not, where rows are cut in
    zigzag.
    """
    return PackedBatch.build([[0] * min(capacity.bound, max(1, capacity.tokens // 2))], capacity)
