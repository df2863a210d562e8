"""Execution of a rank's microbatches, through captured graphs, or eagerly when graphs are off.

    MicrobatchExecutor   one microbatch after the other, by a graph for each capacity
    StepExecutor         a whole step and its update as one graph
    PipelineExecutor     this rank's part of a pipeline's schedule

Which of them a run has is decided once, in `build.py`. The first optimizer steps are real and
eager. Then one sample microbatch per declared capacity is prepared and all graphs are captured at
once, largest first, so that memory is the maximum over capacities and no step of training pays for
capture. In a pipeline the number of slots is what the schedule needs for any number of
microbatches; with granularity `step` the whole schedule of this rank is one graph where that can
be.

    [zero  F0 B0  F1 B1  ...  reduce  clip  AdamW]      one launch; reads the learning rate from
                                                        device memory

In graphs of whole steps all that changes from step to step is device data: documents, label count
and learning rate are copied in before the replay, the optimizer's own step number is advanced by
the graph. Betas, eps, weight decay and the clipping norm are constants of a run, so they may be
baked. A step whose shapes are not in the bank runs by graphs of its microbatches, and the same
update follows eagerly; it is counted with its reason. Replicas reduce inside the graph: spans leave
while the last backward still runs. Sharded layers are exchanged as in graphs of chunks; all else is
reduced behind the last backward then, since a rank that runs eagerly beside replays has to send the
same things in the same order over one group.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.graphs import fallback
from packgraph.graphs.agreement import Consensus, alone
from packgraph.graphs.backend import profiler_range, synchronize
from packgraph.graphs.copy_streams import CopyStreams
from packgraph.graphs.fallback import WARM_UP, Stats, eager
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.graphs.key import undeclared
from packgraph.graphs.stages import Staged, in_scope
from packgraph.graphs.step import GraphedStep
from packgraph.models.recompute import FULL
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.executor import Pipeline, StepUpdate, reason_against
from packgraph.parallel.pipeline.links import make_links
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.parallel.ranks import everywhere, unanimous
from packgraph.train.autotune import Autotune
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import GraphConfig, TrainConfig
from packgraph.train.data.microbatches import StepPack
from packgraph.train.features.context import rank_tokens
from packgraph.train.features.offload import TrainerOffloading
from packgraph.train.features.recompute import LeastRecompute
from packgraph.train.feed import count_loss_tokens
from packgraph.train.memory import MemoryPlan, available_memory, limit_of, plan_memory
from packgraph.train.optimizer import Optimizer
from packgraph.train.progress import SILENT

OFF = "graphs are off"
Around = contextlib.AbstractContextManager[None]
LossFunction = Callable[[PackedBatch, Tensor], Tensor]
# Called as (output, settled=None) before a backward that is the last one to add to the gradients of
# `settled`, None = all parameters.
BeforeLast = Callable[..., None]


class Executor:
    """Runs the microbatches of a rank's steps and owns their graphs: warm-up, capture within the
    memory budget, timing against eager, counts. `close` frees the graphs.

    Attributes:
        graphed: The chunks of the model that this rank runs; empty where graphs are off.
        modules: The model as it is run, chunk by chunk.
        slots: Microbatches in flight of each chunk.
        replays: Whether warm-up is over, so that graphs are replayed.
        whole_steps: Whether microbatches of a step run together, so that steps are timed.
        autotune: Times graphs against eager and says which of them runs; None = graphs always.
        prepare: Plans the offloading when warm-up is over, before anything is captured.
        memory: What graphs take, measured on trial; known when warm-up is over.
        everyone: The ranks that must capture the same, None = this one alone.
        chooses_recompute: Whether trials choose the least recomputation that fits.
        rows_differ: Whether ranks that capture together have rows of other sizes at a time.
        phases: Shows how far captures are.
    """

    whole_steps = False
    captures_ahead = True  # else a step captures what it needs
    graphed: Sequence[GraphedModule]
    modules: Sequence[nn.Module]
    slots: Sequence[int]
    _whole: GraphedStep | None = None

    def __init__(self, options: GraphConfig, device: torch.device) -> None:
        self.replays = False
        self.autotune: Autotune | None = None
        self.prepare: TrainerOffloading | None = None
        self.memory: MemoryPlan | None = None
        self.everyone: dist.ProcessGroup | None = None
        self.chooses_recompute = self.rows_differ = False
        self.phases = SILENT
        self._options, self._device = options, device
        self._consensus: Consensus = alone
        self._consensus_of_steps: Consensus = alone
        self._measured = 0
        self._search: LeastRecompute | None = None
        self._put_off = 0  # steps of warm-up that it took besides

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; see `accumulate`."""
        raise NotImplementedError

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
        optimizer.zero_grad()
        overlap = optimizer.flat.overlap if optimizer.flat.group is not None else None
        loss = self.run_step(batches, loss_tokens, overlap)
        return loss, optimizer.step(learning_rate, loss)

    def evaluate(self, batches: Sequence[PackedBatch]) -> Tensor:
        """Forwards alone of this replica's microbatches, where gradients are off. Returns the sum
        of the token losses that this rank knows, float64 [] on the device."""
        raise NotImplementedError

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """Arguments of a call of chunk number `chunk` with this capacity, for capture."""
        return sample_batch(capacity).to(self._device), self._on_device(1)

    def build(self, capacities: Sequence[Capacity]) -> None:
        """Captures these capacities, largest first; those of a pipeline with its other stages."""
        self.capture_rows(capacities)

    def capture_rows(
        self, capacities: Sequence[Capacity], slots: int | None = None, training: bool = True
    ) -> None:
        """Captures these capacities of each module by itself. slots, training: as in
        `Control.build`."""
        for number, graphed in enumerate(self.graphed):
            samples = [self.arguments(number, capacity) for capacity in capacities]
            graphed.build(samples, slots, training, self._watch)

    def _watch(self, captures: Sequence[Any]) -> Iterator[Any]:
        """Shows how many of these captures are done."""
        what = "compiling and capturing" if self._options.compile else "capturing"
        return self.phases.of(f"{what} graphs", len(captures), captures, "graph")

    @property
    def step_stats(self) -> Stats | None:
        """Counts of graphs of whole steps, None where there are none, or before the first."""
        return None if self._whole is None else self._whole.stats

    def agree_by(self, stage: Consensus, replica: Consensus) -> None:
        """Agrees about captures by `stage`; about those of whole steps, which reach over all
        stages, by `replica`."""
        self._consensus, self._consensus_of_steps = stage, replica
        for graphed in self.graphed:
            control(graphed).capturer.cache.join(stage)
        if self._whole is not None:
            self._whole.cache.join(replica)

    def before_evaluation(self) -> None:
        """Captures the forwards of all rows, in evaluation mode, where ranks have different ones at
        a time: as they come, ranks would not meet to capture the same. Collective."""
        if self.rows_differ and self.replays:
            self.capture_rows(self.bank(), training=False)

    def before_step(self, steps_done: int) -> bool:
        """Captures all graphs if `steps_done` (of this process) is the end of warm-up, and if
        others are wanted; whether it did."""
        is_first, changed = steps_done == self.warmup, False
        steps = steps_done - self._put_off
        if is_first and self.chooses_recompute and not self.replays and self.prepare is not None:
            if not self._recompute_is_found(self.prepare, steps):
                self._put_off += 1  # one more step of warm-up, by which the rest is prepared
                return False
        elif self.prepare is not None:
            changed = self.prepare(steps)
        if changed and self.replays:
            self.free_graphs(None)
        elif not self._options.enabled or not is_first:
            return False
        self.replays = True
        if self.captures_ahead:
            self.build(self._within_budget())
            # Right after the capture: graphs may be given up later.
            self._measured = sum(graphed.stats.pool_bytes for graphed in self.graphed)
        return True

    @property
    def warmup(self) -> int:
        """The steps of this process before the first capture, as far as it is known."""
        return self._options.warmup + self._put_off

    def copy_streams(self, chunk: int) -> CopyStreams | None:
        """The copy streams that copy beside the work of this rank's chunk number `chunk`; None
        where there are no graphs."""
        return self.graphed[chunk].capture_backend.copy_streams if self.graphed else None

    @contextlib.contextmanager
    def rebuilding(self) -> Iterator[None]:
        """Within the block shapes in the model change: graphs are given up before it, since they
        hold memory that the new ones need, and captured anew behind it. Nothing may be in
        flight."""
        synchronize(self._device)
        self.free_graphs(None)
        yield
        if self.replays:
            self.before_step(self.warmup)
            if self.autotune is not None:
                self.autotune.give_up_slower()

    def _on_device(self, number: int) -> Tensor:
        return torch.full((), number, dtype=torch.int64, device=self._device)

    @property
    def _tuned(self) -> Autotune | None:
        return self.autotune if self.replays else None

    def _around_step(self, batches: Sequence[PackedBatch]) -> Around:
        tuned = self._tuned
        return contextlib.nullcontext() if tuned is None else tuned.step(batches)

    def _around_forward(self, batch: PackedBatch) -> Around:
        tuned = self._tuned
        return contextlib.nullcontext() if tuned is None else tuned.chosen(batch)

    def _within_budget(self) -> Sequence[Capacity]:
        """Predicts what graphs will take; the capacities to capture, largest first."""
        limit = limit_of(self._options.memory_budget, self._device)
        chosen: tuple[str, ...] = ()
        if self.chooses_recompute and self.prepare is None:
            self._search = self._new_search()
            self._search.next(self._needed, lambda _: None)
        if self._search is not None and (self.prepare is None or self.memory is None):
            chosen = (self._search.note(),)
        with self.phases.during("measuring the memory of graphs"):
            plan = self._plan(self._options.captured_capacities(), limit)
        self.memory = replace(plan, notes=(*chosen, *plan.notes))
        return self.memory.kept[::-1]

    def _plan(self, capacities: Sequence[Capacity], limit: int | None) -> MemoryPlan:
        return plan_memory(
            self.graphed,
            self.arguments,
            self.slots,
            capacities,
            limit,
            partial(everywhere, self.everyone),
            self._consensus,
        )

    def _new_search(self) -> LeastRecompute:
        limit = limit_of(self._options.memory_budget, self._device)
        room = available_memory(self._device) if limit is None else limit
        return LeastRecompute(self.graphed, room, partial(everywhere, self.everyone))

    def _needed(self) -> int | None:
        """Bytes of graphs of the largest capacity; None where a trial failed."""
        banks = self._plan([max(self._options.captured_capacities())], None).banks
        return sum(bank.total for bank in banks) if banks else None

    def _recompute_is_found(self, prepare: TrainerOffloading, steps_done: int) -> bool:
        """Plans the offloading by the last step, and tells whether graphs fit with that; else
        leaves the model with the next recomputation that fits in a trial."""
        if self._search is None:
            self._search = self._new_search()
        elif self._search.kind == FULL:
            prepare(steps_done)
            return True
        else:
            try:
                prepare(steps_done)
            except ConfigError as error:  # on all ranks: what was asked for cannot be had so
                self._search.refuse("; ".join(error.problems))
            else:
                if self._search.fits(self._needed, " as planned"):
                    return True
        self._search.next(self._needed, prepare.start_over)
        return False

    def tune(self, batches: Sequence[StepPack], note: Callable[[str], None]) -> bool:
        """After `before_step`: decide which way each microbatch of the step runs; whether the step
        is timed for that.

        batches: all packs of the step, those of other replicas too; see `Autotune.begin`.
        """
        is_final = self.prepare is None or self.prepare.is_final
        return is_final and self._tuned is not None and self._tuned.begin(batches, note)

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
        every = [graphed.stats for graphed in self.graphed]
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
            if all(capacity in graphed.capacities for graphed in self.graphed)
        ]

    def tell_choices(self, choices: dict[str, dict[str, Any]]) -> None:
        """Put what was chosen between graphs and eager into the stats."""
        for graphed in self.graphed:
            graphed.stats.choices.update(choices)

    def changes(self) -> tuple[int, int]:
        """Captures, and microbatches that ran eagerly, so far."""
        fallbacks = sum(sum(graphed.stats.fallbacks.values()) for graphed in self.graphed)
        return self.totals()["captured"], fallbacks

    def pool_bytes(self) -> int:
        """Bytes that all pools hold."""
        return sum(stats.pool_bytes for stats in self._all_stats())

    def free_graphs(self, bucket: Capacity | None) -> None:
        """Gives up the graphs of `bucket`, None = all, and those of whole steps; nothing may be
        under way. Its microbatches must run eagerly."""
        if self._whole is not None:
            self._whole.close()
        for number, graphed in enumerate(self.graphed):
            if bucket is None:
                control(graphed).capturer.forget_all()
            else:
                control(graphed).forget(self.arguments(number, bucket))

    def _all_stats(self) -> list[Stats]:
        whole = self.step_stats
        return [graphed.stats for graphed in self.graphed] + ([] if whole is None else [whole])

    def totals(self) -> dict[str, Any]:
        """Counts since the start of this process: captured, replayed, fallbacks {reason: count},
        capture_seconds.

        A replayed whole step counts once, whatever number of microbatches it has.
        """
        every, fallbacks = self._all_stats(), Counter[str]()
        for stats in every:
            of = "whole step: " if stats is self.step_stats else ""
            fallbacks.update({of + reason: count for reason, count in stats.fallbacks.items()})
        return {
            "captured": sum(stats.captured for stats in every),
            "replayed": sum(stats.replayed for stats in every),
            "fallbacks": dict(fallbacks),
            "capture_seconds": sum(stats.capture_seconds for stats in every),
        }

    def summary(self) -> dict[str, Any]:
        """Graph entries of summary.json; counts and bytes are those of this process."""
        captures = self.graphed and self._options.enabled
        found = {"backend": self.graphed[0].backend if captures else "eager", **self.totals()}
        if self.graphed:
            found["pool_bytes"] = self.pool_bytes()
        if self.memory is not None:
            found["memory"] = self.memory.summary(self._measured)
        for part in (self.autotune, self.prepare):
            found |= {} if part is None else part.summary()
        if self._options.compile:
            every = [graphed.stats for graphed in self.graphed]
            found["compiled"] = sum(stats.compiled for stats in every)
            found["recompiles"] = dict(sum((stats.recompiles for stats in every), Counter()))
            found["compile_seconds"] = round(sum(stats.compile_seconds for stats in every), 3)
        return found

    def close(self) -> None:
        """Frees all graphs and their memory, before the process groups go."""
        if self._whole is not None:
            self._whole.close()
        for graphed in self.graphed:
            graphed.close()


def accumulate(
    loss_function: LossFunction,
    batches: Sequence[PackedBatch],
    device: torch.device,
    *,
    in_flight: bool = False,
    loss_tokens: int | None = None,
    before_last: BeforeLast | None = None,
) -> Tensor:
    """Forward and backward of all microbatches of a step; gradients are added to `.grad`.

    batches: packs on the host; each is uploaded once. in_flight: run all forwards before the first
    backward (the backwards then go in reverse), as pipelines do. loss_tokens: of the whole step,
    when `batches` are a share of it. before_last: called with the loss whose backward is the last.
    Returns the sum of token losses / loss_tokens, float32 [] on the device.
    """
    loss_tokens = count_loss_tokens(batches) if loss_tokens is None else loss_tokens
    tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    waiting: list[Tensor] = []
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        with profiler_range("microbatch", number, batch.capacity):
            loss = loss_function(batch.to(device), tokens_in_step)
            total += loss.detach()
            waiting.append(loss)
            if in_flight and not is_last:
                continue
            while waiting:
                loss = waiting.pop()
                if before_last is not None and is_last and not waiting:
                    before_last(loss)
                loss.backward()
    return total


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


class MicrobatchExecutor(Executor):
    """Runs microbatches of one model one after another."""

    def __init__(self, model: nn.Module, options: GraphConfig, device: torch.device) -> None:
        super().__init__(options, device)
        self.model, self.modules = model, [model]
        self.slots = [options.slots or 1]
        self.graphed = []
        if options.enabled:
            # One call of warm-up shows which outputs get gradients; `before_step` counts the rest
            # of the warm-up steps.
            self.graphed = [
                graph(
                    model,
                    capacities=options.captured_capacities(),
                    backend=options.backend,
                    warmup=1,
                    slots=options.slots,
                    strict=options.strict,
                    scope=options.scope,
                    granularity="chunk" if self.whole_steps else options.granularity,
                    compile=options.compile,
                )
            ]

    def loss(self, batch: PackedBatch, tokens_in_step: Tensor) -> Tensor:
        """Loss of one microbatch on the device, float32 []: its sum of token losses /
        tokens_in_step (int64 [])."""
        if not self.graphed:
            return self.model(batch, tokens_in_step)
        (graphed,) = self.graphed
        if self.replays or not graphed.stats.fallbacks:
            return graphed(batch, tokens_in_step)
        with eager(WARM_UP):
            return graphed(batch, tokens_in_step)

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
    ) -> Tensor:
        """See `Executor.run_step`."""
        if not self.graphed or not self.replays:
            return accumulate(
                self.loss, batches, self._device, loss_tokens=loss_tokens, before_last=before_last
            )
        (graphed,), tokens_in_step = self.graphed, self._on_device(loss_tokens)
        tuned = None if self.whole_steps else self._tuned
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        with graphed.frozen():
            for number, batch in enumerate(batches):
                before = before_last if number == len(batches) - 1 else None
                around = contextlib.nullcontext() if tuned is None else tuned.microbatch(batch)
                with around, profiler_range("microbatch", number, batch.capacity):
                    total += control(graphed).forward_backward(
                        batch.to(self._device), tokens_in_step, before=before
                    )
        return total

    def evaluate(self, batches: Sequence[PackedBatch]) -> Tensor:
        """See `Executor.evaluate`."""
        one, total = self._on_device(1), torch.zeros((), dtype=torch.float64, device=self._device)
        forward: Callable[..., Tensor] = self.model
        if self.graphed:  # in warm-up uncounted: it is a matter of training
            own = control(self.graphed[0])
            forward = own if self.replays else own.run_eagerly
        for number, batch in enumerate(batches):
            around = self._around_forward(batch)
            with around, profiler_range("evaluation", number, batch.capacity):
                total += forward(batch.to(self._device), one)
        return total


class StepExecutor(MicrobatchExecutor):
    """Runs whole steps of a model that is not cut into stages, by one process, or by ranks that
    have as many microbatches of the same capacities.

    A step that cannot be one graph runs by graphs of its microbatches.
    """

    whole_steps = True
    captures_ahead = False

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        """See `Executor.train_step`; in one replay where the step's shapes are in the bank."""
        given = batches, loss_tokens, optimizer, learning_rate
        if not self.replays or not batches:
            return super().train_step(*given)
        if self._whole is None:
            self._whole = self._graphed_step(optimizer)
        whole, tokens_in_step = self._whole, self._on_device(loss_tokens)
        with self._around_step(batches):
            if fallback.bypass_reason() is not None:
                return super().train_step(*given)
            uploaded = [batch.to(self._device) for batch in batches]
            if isinstance(self.model, Staged):
                # May refuse what the host alone knows, and a graph would not.
                for batch in uploaded:
                    self.model.begin(batch, tokens_in_step)
            if (reason := self._reason_against(whole, tokens_in_step, uploaded)) is None:
                optimizer.set_learning_rate(learning_rate)
                loss, norm = whole.replay(tokens_in_step, *uploaded).unbind()
                return loss, norm
            whole.stats.fallbacks[reason] += 1
            # Where others replay, a capture would exchange more than they do.
            exchanges = self._consensus is not alone
            stays_eager = exchanges and whole.others_replay(tokens_in_step, *uploaded)
            with eager(reason) if stays_eager else contextlib.nullcontext():
                return super().train_step(*given)

    def _graphed_step(self, optimizer: Optimizer) -> GraphedStep:
        # Nothing of ours: that would be a cycle, with the model in it.
        (graphed,), device = self.graphed, self._device
        update = _update_of(optimizer, [None])

        # Microbatch by microbatch, as by their graphs.
        def run(tokens_in_step: Tensor, *batches: PackedBatch, is_dry_run: bool) -> Tensor:
            update.begin()
            total = torch.zeros((), dtype=torch.float32, device=device)
            for number, batch in enumerate(batches):
                loss = graphed.run_eagerly(batch, tokens_in_step)
                total += loss.detach()
                is_last = number == len(batches) - 1 and not is_dry_run
                if update.before_last is not None and is_last:
                    update.before_last(0, loss)
                loss.backward()
            return total

        made = GraphedStep(
            [self.model],
            run,
            graphed.capture_backend,
            device,
            compiled=graphed.compiles,
            finish=update.finish,
        )
        made.cache.join(self._consensus_of_steps)
        return made

    def _reason_against(
        self, whole: GraphedStep, tokens_in_step: Tensor, batches: Sequence[PackedBatch]
    ) -> str | None:
        """Reason why this step cannot be a replay, or None; captures it if it is new."""
        declared, strict = self._options.captured_capacities(), self._options.strict
        return undeclared((tokens_in_step, *batches), {}, declared) or reason_against(
            whole, "microbatches", tokens_in_step, *batches, strict=strict
        )


class PipelineExecutor(Executor):
    """Runs this rank's chunks of a pipeline. Collective: every rank of the pipeline runs the same
    steps."""

    whole_steps = True

    def __init__(
        self, chunks: Sequence[nn.Module], config: TrainConfig, device: torch.device, mesh: Mesh
    ) -> None:
        """chunks: this rank's part of the model, in the order of its stages."""
        options, parallel, tokens = config.graph, config.parallel, rank_tokens(config)
        super().__init__(options, device)
        links = make_links(mesh)
        self.slots = slot_counts(links.size, len(chunks))[links.rank]
        self.graphed = [
            graph(
                chunk,
                capacities=options.captured_capacities(),
                backend=options.backend,
                warmup=0,
                slots=slots,
                strict=options.strict,
                scope=_own_scope(chunk, options),
                granularity="chunk" if options.granularity == "step" else options.granularity,
                compile=options.compile,
            )
            for chunk, slots in zip(chunks, self.slots, strict=True)
        ]
        self.modules = chunks
        self._parameters = [list(chunk.parameters()) for chunk in chunks]
        self._pipeline = Pipeline(
            self.graphed,
            links,
            config.model.hidden_size,
            getattr(torch, config.run.dtype),
            device,
            whole_steps=options.granularity == "step" and options.enabled,
            row_parts=parallel.row_parts,
            rank_rows=None if tokens is None else tokens // (parallel.row_parts // parallel.cp),
            updates=options.optimizer,
            agreement=unanimous(mesh.host_group) if options.optimizer else None,
        )
        self._whole = self._pipeline.whole
        self._update: StepUpdate | None = None

    def run_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        before_last: BeforeLast | None = None,
    ) -> Tensor:
        """See `Executor.run_step`.

        before_last: called for each chunk, with the output whose backward is its last and the
        chunk's parameters; not called where a whole step is one graph.
        """
        if not batches:  # a step with fewer packs than replicas: all ranks of this one have none
            return torch.zeros((), dtype=torch.float32, device=self._device)

        def settle(chunk: int, output: Tensor) -> None:
            assert before_last is not None
            before_last(output, self._parameters[chunk])

        uploaded = [batch.to(self._device) for batch in batches]
        with self._bypass(), self._around_step(batches):
            return self._pipeline.step(
                uploaded, self._on_device(loss_tokens), None if before_last is None else settle
            )

    def _bypass(self) -> Around:
        if self.replays and self._options.enabled:
            return contextlib.nullcontext()
        return eager(WARM_UP if self._options.enabled else OFF)

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_tokens: int,
        optimizer: Optimizer,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor]:
        """See `Executor.train_step`; by one replay where graphs hold the update."""
        options = self._options
        if options.enabled and options.optimizer and self.replays and batches:
            tokens_in_step = self._on_device(loss_tokens)
            uploaded = [batch.to(self._device) for batch in batches]
            self._update = self._update or _update_of(optimizer, self._parameters)
            optimizer.set_learning_rate(learning_rate)
            with self._bypass(), self._around_step(batches):
                made = self._pipeline.update_step(
                    uploaded,
                    tokens_in_step,
                    self._update,
                    undeclared((tokens_in_step, *uploaded), {}, options.captured_capacities()),
                    strict=options.strict,
                )
            if made is not None:
                return made[0], made[1]
        return super().train_step(batches, loss_tokens, optimizer, learning_rate)

    def evaluate(self, batches: Sequence[PackedBatch]) -> Tensor:
        """See `Executor.evaluate` and `Pipeline.evaluate`."""
        if not batches:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        uploaded = [batch.to(self._device) for batch in batches]
        with self._bypass():
            return self._pipeline.evaluate(uploaded, self._on_device(1), self._around_forward)

    def arguments(self, chunk: int, capacity: Capacity) -> tuple[Any, ...]:
        """See `Executor.arguments`."""
        return self._pipeline.sample_arguments(chunk, sample_batch(capacity).to(self._device))

    def build(self, capacities: Sequence[Capacity]) -> None:
        """See `Executor.build`."""
        self._pipeline.build(
            [sample_batch(capacity).to(self._device) for capacity in capacities],
            self.slots,
            self._watch,
        )


def _update_of(optimizer: Optimizer, parameters: Sequence[Sequence[Tensor] | None]) -> StepUpdate:
    """The update of a step in its graph. parameters: by chunk, None = all."""
    flat = optimizer.flat

    def before_last(chunk: int, output: Tensor) -> None:
        flat.overlap(output, parameters[chunk])

    def finish(loss: Tensor) -> Tensor:
        return torch.stack([loss, optimizer.update(loss)])

    # Between exchanges of sharded layers ranks would reduce other spans at different times.
    overlaps = flat.group is not None and not flat.shards_layers
    return StepUpdate(optimizer.zero_grad, before_last if overlaps else None, finish)


def _own_scope(chunk: nn.Module, options: GraphConfig) -> tuple[str, ...] | None:
    """The names in the scope that this chunk has a stage for; only the last one of a pipeline has a
    head."""
    if options.scope is None or not isinstance(chunk, Staged):
        return options.scope
    stages = chunk.stages()
    return tuple(
        name for name in options.scope if any(in_scope(stage.name, [name]) for stage in stages)
    )
