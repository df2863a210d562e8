"""A training run: documents to packs to graphs to a trained model.

    packs ─▶ step     ─▶ forward, backward of each ─▶ clip, AdamW
          ─▶ numbers of the step before ─▶ log, checkpoint

    Trainer ─▶ resume ─▶ run ─▶ _steps ─▶ _one_step ─▶ _launch ─▶ _report ─▶ _save ─▶ close
                                  └──── _go_back ◀──────────────────┘

The host never waits for the device within a step; the numbers of a step are read after the next one
was launched. Several processes run the same loop over the same packs and take their share of each
step; what they decide by, they agree on. The invariants: a checkpoint never holds the state of a
run whose loss or gradients are not finite, a run that goes on from one is bitwise the run that
never stopped, and a stop by a signal comes between steps.

Steps whose numbers the host has not read yet are kept, so that they can be made again. A step that
did not fit into the budgets of experts has changed nothing (`train/features/moe.py`), and neither
has what was launched after it. Made again, from the same packs, rates and random states, with more
room, they are what they would have been: the run is bitwise one that had the room from the start.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.models.decoder import ModelChunks
from packgraph.models.foreign import in_one_line
from packgraph.models.layers.prediction import LossSums
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.heartbeat import Whereabouts
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.ranks import TIMEOUT, everywhere, on_first
from packgraph.parallel.tensor import dropout_seed
from packgraph.torch_internals import norm_each
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.checkpoint.background import Saves
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import best_checkpoint, checkpoint_to_resume, load_tensors
from packgraph.train.config.reading import to_dict
from packgraph.train.config.sections import TrainConfig
from packgraph.train.data import DataError, Microbatches, PlannedSteps
from packgraph.train.evaluation import Evaluation
from packgraph.train.features.context import (
    is_wanted,
    measured_cost,
    rank_tokens,
    slowest_rank,
    time_row,
    undisturbed,
)
from packgraph.train.features.lora import BASE, base_fingerprints, check_base
from packgraph.train.features.moe import MOST_ATTEMPTS, restore_room, room_of_experts
from packgraph.train.features.preference import FIGURES, PreferenceModel
from packgraph.train.feed import (
    PATIENCE,
    MicrobatchAssignment,
    NoDataError,
    StepFeed,
    count_loss_tokens,
    count_pairs_of_answers,
)
from packgraph.train.metrics import (
    METRICS,
    NAMES,
    MetricsLog,
    RowsOnly,
    fetch_late,
    finite,
    summarize,
)
from packgraph.train.node_folders import NodeFolders, checkpoint_here, shared_folder
from packgraph.train.optimizer import CHANGED_SUMS, learning_rate_of, warn_of_sums
from packgraph.train.progress import RUN_LOG, ProgressView
from packgraph.train.random_state import all_streams, random_states, set_random_states, stream_name
from packgraph.train.run_files import CHECKPOINTS, CONFIG, SUMMARY, read_json, write_json, writing
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import GoBack, Limits, NonFiniteLossError, Spikes
from packgraph.train.strategies import add_counts
from packgraph.train.throughput import Throughput

OPTIMIZER = "optimizer."  # stored names of its state begin so
RANDOM = "random."  # stored names of random states begin so; a rank needs only its own
COMPLETED = "all steps done"
DATA_ENDED = "the data ended"
KEPT_POSITIONS = 4  # steps; one is launched before the numbers of the last are known


@dataclass
class LaunchedStep:
    """A step whose numbers the host has not read yet.

    share: this replica's packs. loss_tokens: of all replicas. limits: of its loss and gradient
    norm. row: its entry in metrics.jsonl, as far as the host knows it; tokens, places and
    microbatches are those of all replicas, replayed and fallbacks those of this rank since the
    start of the run, times in seconds. has_labels: some replica's packs have. random: generators
    before it. made: times it was. numbers: waits for them; see `Trainer._numbers`.
    """

    share: Sequence[PackedBatch]
    loss_tokens: int
    learning_rate: float
    limits: Limits
    row: dict[str, Any] = field(default_factory=dict)
    has_labels: bool = True
    random: dict[str, Tensor] = field(default_factory=dict)
    made: int = 0
    numbers: Callable[[], list[float]] = list


class Trainer:
    """Owns model, optimizer, data and executor of one run. `run` trains; `close` frees the
    graphs."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        microbatches: Microbatches,
        device: torch.device,
        view: ProgressView,
        mesh: Mesh | None = None,
        whereabouts: Whereabouts | None = None,
        nodes: NodeFolders | None = None,
        evaluation: Mapping[str, Microbatches] | None = None,
    ) -> None:
        """microbatches: the resumable iterator of packs on the host, the same on all processes of
        `mesh`. evaluation: by source, packs to evaluate on, at their beginning.

        whereabouts: what other ranks are told of this one. nodes: which ranks see the same
        `folder`, all of them by default. Creates nothing in `folder` yet.
        """
        self.config, self.folder, self.microbatches = config, folder, microbatches
        self.after_step: Callable[[], object] = bool  # called after every step
        self.device, self.view, self.mesh = device, view, mesh or single_process()
        self._whereabouts = whereabouts or Whereabouts()
        self._nodes = nodes or shared_folder(self.mesh)
        if config.parallel.dispatcher_name == "symmetric":
            # Its barriers wait in kernels, for ever.
            self._whereabouts.limit = TIMEOUT.total_seconds()
        self._splits_rows = config.parallel.splits_rows
        sharing = MicrobatchAssignment.of(
            self.mesh, rank_tokens(config), in_step=config.replicas_in_step
        )

        def feed(stream: Microbatches) -> StepFeed:
            patience = 0.0 if self.mesh.world == 1 else PATIENCE
            per_step, ahead = config.run.tokens_per_step, config.data.prefetch
            count = count_pairs_of_answers if config.loss.is_of_pairs else count_loss_tokens
            return StepFeed(stream, per_step, sharing, device, ahead, patience, count)

        self.feed = feed(microbatches)
        torch.manual_seed(dropout_seed(config.run.seed, self.mesh, sequence=self._splits_rows))
        self.model = build_chunks(config, device, self.mesh)
        self._bases: tuple[str, ...] = ()
        if config.lora.enabled:
            resumed = bool(config.run.resume)
            self._bases = base_fingerprints(self.model, self.mesh, resumed=resumed)
        self.optimizer = make_optimizer(self.model, config, self.mesh)
        self._sums, self._tells_sums = config.gradient_dtype(self.mesh.world), True
        self.executor = make_executor(self.model, config, device, self.mesh)
        self.executor.phases = view.phases
        if config.copies_weights:
            (whole,) = self.executor.modules
            assert isinstance(whole, PreferenceModel) and whole.reference is not None
            reference = ModelChunks([whole.reference])
            self._bases = base_fingerprints(reference, self.mesh, resumed=bool(config.run.resume))
        self._throughput = Throughput(config, device, self.mesh.world)
        if config.run.on_spike == "skip":
            self.optimizer.watch()
        self.spikes = Spikes()
        self._saves = Saves(
            folder / CHECKPOINTS,
            config.run.keep_checkpoints,
            self.mesh,
            self._nodes,
            self._whereabouts,
            view.note,
        )
        # Of further tokens: the last pipeline stage alone has any. Or of pairs.
        modules = [module for chunk in self.executor.modules for module in chunk.modules()]
        self._further = [module for module in modules if isinstance(module, LossSums)]
        depths = 0 if config.hf.path is not None else config.model.mtp_layers
        self._names = [f"mtp_loss/{n}" for n in range(1, depths + 1)]
        if config.loss.is_of_pairs:
            self._names = [*FIGURES]
        self.evaluation = Evaluation(
            config.eval, evaluation, feed, self.executor, self.optimizer, self.mesh
        )
        self.step = 0
        self._made = 0  # steps that this process has launched
        self._labelled = False  # one of them had a label
        self._resumed_at = 0
        self._launched: deque[LaunchedStep] = deque()  # oldest first
        self.repeated = 0  # steps that were made again
        self._last_end = self._pause = 0.0
        self._saved_at = 0
        # Of the data, after each of the newest steps.
        self._positions: dict[int, dict[str, Any]] = {}
        self._stop, self._others_stopped = StopRequest(), False
        self._log: MetricsLog | RowsOnly = RowsOnly()
        self._graphs_before: dict[str, Any] = {}
        self._summary_before: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of model and optimizer by flat name."""
        stored = self.model.stored(self.optimizer.flat.gathered())
        model = {f"model.{name}": value for name, value in stored.items()}
        return model | {
            OPTIMIZER + name: value for name, value in self.optimizer.state_tensors().items()
        }

    def resume(self) -> None:
        """Go on from the newest checkpoint of the run, or the best. Raises CheckpointError."""
        best = self.config.run.resume == "best"
        path, step, state, damaged = on_first(
            self.mesh,
            lambda: checkpoint_to_resume(self.folder / CHECKPOINTS, self.device.type, best=best),
            CheckpointError,
        )
        self.view.note(*(f"{told}. It is passed over" for told in damaged))
        self.view.note(*self._load(path, step, state))
        room = state.get("experts", {})
        self.view.note(*restore_room(self.model, self.config, self.mesh, room))
        try:
            self.feed.load_state_dict(state["data"])
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        self._graphs_before = state["graphs"]
        self._summary_before = on_first(
            self.mesh, lambda: read_json(self.folder / SUMMARY, checked=True)
        )
        self._resumed_at = step
        self._whereabouts.checkpoint = str(path)
        self.view.note(f"resumed from {path}")

    def _load(self, path: Path, step: int, state: Mapping[str, Any]) -> list[str]:
        """Take tensors, random states and what is known of spikes from a checkpoint. Returns notes
        for people."""
        told, tensors = [], self.tensors()
        check_base(path, state, self._bases)
        streams = all_streams(self.mesh, sequence=self._splits_rows)
        goes_on = state.get("random_streams", ["random"]) == streams
        random = self._random_states()
        with (
            self.view.phases.during(f"reading {path.name}"),
            checkpoint_here(path, self.mesh, self._nodes) as here,
        ):
            load_tensors(here, tensors | (random if goes_on else {}), RANDOM, self.mesh)
        self.optimizer.load({name.removeprefix(OPTIMIZER): t for name, t in tensors.items()})
        if goes_on:
            states = {name.rpartition(".")[2]: value for name, value in random.items()}
            set_random_states(states, self.device)
        else:
            seed = self.config.run.seed + step
            torch.manual_seed(dropout_seed(seed, self.mesh, sequence=self._splits_rows))
            told.append("saved at another layout: dropout goes on with new random numbers")
        self.step = step
        # Checkpoints that do not say it were written when sums had the weights' dtype.
        before, now = state.get("gradients", self.config.run.dtype), self._sums
        told += [CHANGED_SUMS.format(before=before, now=now)] * (before != now)
        try:
            self.spikes = Spikes.restored(state.get("spikes", {}))
            return told + self.evaluation.restore(state.get("evaluation", {}))
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: damaged: what it says of spikes and evaluations: {in_one_line(error)}; "
                "go on from another checkpoint"
            ) from error

    def _random_states(self) -> dict[str, Tensor]:
        """The random states of this rank, by their names in checkpoints."""
        place = self.mesh.layout.coordinates(self.mesh.rank)
        stream = stream_name(place, sequence=self._splits_rows)
        return {f"{stream}.{name}": value for name, value in random_states(self.device).items()}

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train until all steps are done, the data ends or `stop` asks. Returns the summary, which
        is also written.

        Raises NonFiniteLossError, CheckpointError, and what the data raise on bad input.
        """
        steps, before = self.config.run.steps, self._summary_before
        if self._resumed_at >= steps and before.get("steps") == self.step:
            self.view.note(f"nothing to do: all {steps} steps are done; raise run.steps to go on")
            # A run that was stopped before is not to be started again.
            stopped = before.pop("exit_code", None) is not None
            return before | ({"ended": COMPLETED} if stopped else {})
        self._stop = stop
        for feed in (self.feed, *self.evaluation.feeds.values()):
            feed.stop = stop
        self._begin_folder()
        self._open_log()
        if damaged := self._log.damaged:
            lines = ", ".join(map(str, damaged[:8])) + (" …" if len(damaged) > 8 else "")
            self.view.note(
                f"{METRICS}: damaged lines are left out, the others kept (of what it was: {lines})"
            )
        ended = COMPLETED
        try:
            every = self.config.run.checkpoint_every
            due = (self.step // every + 1) * every if every else steps
            # Before the last step; the best one is saved, too.
            on_the_way = due < steps or (every and self.evaluation.enabled)
            if self.config.run.async_checkpoints and on_the_way:
                self._saves.prepare(self.tensors() | self._random_states(), self.device)
            self._saved_at, self._last_end = self.step, time.perf_counter()
            if self.config.run.on_spike == "rollback" and not self._whereabouts.checkpoint:
                self._write_checkpoint()  # to go back to
            while (done := self._steps()) is None:
                self._log.close()
                self._open_log()
            ended = done
            if self._made and not self._labelled and not self._resumed_at:
                raise DataError(
                    f"none of the {self.step} steps had a label, so nothing was learned; give rows "
                    "that hold an answer (graph.capacities, data.overlong)"
                )
        except DataError as error:
            # To save takes all ranks.
            if together := self._whereabouts.together(f"bad data after step {self.step}"):
                with contextlib.suppress(GoBack):  # the newest checkpoint stays
                    # The data are in the middle of another step.
                    self._save(self._positions.get(self.step))
            if not (together and isinstance(error, NoDataError)):
                raise
            self._others_stopped = True
        finally:
            self._log.close()
        code = {}
        if self.step < steps and self._must_stop():
            ended = f"stopped by {stop.reason or 'a signal to another process'}"
            code = {"exit_code": stop.exit_code()}
        summary = self._summary(ended) | code
        if self.mesh.rank == 0:
            write_json(self.folder / SUMMARY, summary)
        return summary

    def _steps(self) -> str | None:
        """Train to the end, and save there. Returns why it ended; None if the run has gone back to
        a checkpoint."""
        ended, steps, every = "", self.config.run.steps, self.config.run.checkpoint_every
        try:
            while self.step < steps and not self._must_stop():
                if ended := self.evaluation.ending or ("" if self._one_step() else DATA_ENDED):
                    break
                self.after_step()
                due = self.evaluation.is_due(self.step)
                self._report(leave=0 if due else 1)
                is_best = due and self.evaluation.best.step == self.step
                if is_best or (every and self.step % every == 0):
                    self._save(goes_on=self.step < steps)
            self._save()
        except GoBack as found:
            self._go_back(found)
            return None
        return ended or COMPLETED

    def _go_back(self, found: GoBack) -> None:
        """Load the newest checkpoint; the data go on after the step that went wrong. Collective.

        Steps that were launched after that one are forgotten, and their data come again: what the
        host happened to have launched does not count, so a resumed run goes the same way.
        """
        self._launched.clear()
        self._saves.wait()
        self.feed.load_state_dict(self._positions.get(found.step) or self.feed.state_dict())
        spikes, wrong = self.spikes, self.step
        newest = partial(checkpoint_to_resume, self.folder / CHECKPOINTS, self.device.type)
        path, step, state, _ = on_first(self.mesh, newest, CheckpointError)
        self._load(path, step, state)
        self.spikes.seen, self.spikes.rolled_back = spikes.seen + 1, spikes.rolled_back + 1
        self.spikes.returns = spikes.returns + 1
        self._saved_at, self._positions = step, {}
        self.view.note(
            f"step {found.step}: {found}. Back to {path} ({wrong - step} steps), on with other data"
        )

    def close(self) -> None:
        """Wait for a checkpoint that is being written, free all graphs and their memory, and end
        the threads that make steps ahead. Raises CheckpointError."""
        try:
            self._saves.close()
        finally:
            self.feed.close()
            self.evaluation.close()
            self.executor.close()

    def _begin_folder(self) -> None:
        """Create the folder and the configuration of the run, on rank 0."""
        if self.mesh.rank == 0:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                # Of a run that ended before its first checkpoint.
                for name in () if self._resumed_at else (SUMMARY, NAMES, RUN_LOG):
                    (self.folder / name).unlink(missing_ok=True)
            self.view.open_log(self.folder)
        # On other nodes for `--config runs/NAME/config.json` there.
        if self.mesh.rank == 0 or self._nodes.leads(self.mesh.rank):
            write_json(self.folder / CONFIG, self._stored_config())

    def _open_log(self) -> None:
        """Open the log after the step that the run is at: rows behind it, as of before the run has
        gone back, are cut."""
        if self.mesh.rank != 0:
            self._log = RowsOnly([row for row in self._log.rows if row["step"] <= self.step])
            return
        self._log = MetricsLog(
            self.folder,
            last_step=self.step,
            trackers=self.config.run.tracker,
            config=self._stored_config(),
            note=self.view.note,
        )

    def _stored_config(self) -> dict[str, Any]:
        """The configuration; `--resume` is a wish of this call, and a copy of config.json starts a
        run of its own."""
        return to_dict(replace(self.config, run=replace(self.config.run, resume=False)))

    def _must_stop(self) -> bool:
        """Tells whether the run ends here, also because a checkpoint could not be written. Several
        processes find out together, from the numbers of a finished step."""
        return self._wants_to_stop() if self.mesh.world == 1 else self._others_stopped

    def _wants_to_stop(self) -> bool:
        return bool(self._stop) or self._saves.failed

    def _one_step(self) -> bool:
        """Launch one optimizer step; False when the data ended."""
        warmup, is_first = self.executor.warmup, self._made == 0
        phase = ("warm-up", "capture", "replay")[(self._made >= warmup) + (self._made > warmup)]
        self._whereabouts.at(phase if self.config.graph.enabled else "training", self.step + 1)
        rows_timed = self._time_rows()
        self._positions[self.step] = self.feed.state_dict()
        self._positions.pop(self.step - KEPT_POSITIONS, None)
        asked = time.perf_counter()
        fed = self.feed.take()
        data_wait = time.perf_counter() - asked
        if not fed.packs:
            return False
        self.view.tell_left_out(fed.counts)
        if captured := self.executor.before_step(self._made):
            self._whereabouts.at("replay", self.step + 1)
            memory = self.executor.memory
            self.view.note(*(() if memory is None else memory.notes))
        timed = self.executor.tune(fed.packs, self.view.note)
        step = LaunchedStep(
            fed.share,
            fed.loss_tokens,
            learning_rate_of(self.config.optimizer, self.config.run.steps, self.step),
            self.spikes.limits(self.step + 1),
            has_labels=any(batch.num_loss_tokens for batch in fed.packs),
        )
        self._launch(step)
        self._launched.append(step)
        started, self._last_end = self._last_end, time.perf_counter()
        self.step += 1
        self._made += 1
        graphs, starting = self._graphs(), captured or timed or rows_timed or is_first
        step.row = {
            "step": self.step,
            "loss": None,
            "gradient_norm": None,
            "learning_rate": step.learning_rate,
            "tokens": sum(batch.num_tokens for batch in fed.packs),
            "places": sum(batch.capacity.tokens for batch in fed.packs),
            "microbatches": len(fed.packs),
            "replayed": graphs["replayed"],
            "fallbacks": sum(graphs["fallbacks"].values()),
            "seconds": self._last_end - started,
            "data_wait": data_wait,
            "starting": starting,
        }
        step.row |= self._throughput.figures(
            self.step, fed.packs, step.row["seconds"], starting=starting
        )
        if self._pause:  # part of `seconds`: the step waited for the checkpoint before
            step.row["checkpoint_pause"] = self._pause
        self._pause = 0.0
        self.feed.go_on()
        if self._tells_sums and (narrow := warn_of_sums(self._sums, len(fed.share))):
            self._tells_sums = False
            self.view.note(narrow)
        return True

    def _launch(self, step: LaunchedStep) -> None:
        """Make a step, and start to copy its numbers to the host."""
        step.random = random_states(self.device)
        step.made += 1
        if self.optimizer.overflow is not None:
            self.optimizer.overflow.begin()
        self.optimizer.set_limits(step.limits)
        loss, norm = self.executor.train_step(
            step.share, step.loss_tokens, self.optimizer, step.learning_rate
        )
        step.numbers = fetch_late(self._numbers(loss, norm))

    def _numbers(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Figures of the newest step, float32 [5 + D] on the device: loss, norm, how many processes
        want to stop, whether the step changed nothing because experts lacked room, or because of a
        spike, and the losses of further tokens, or figures of pairs. To be asked once for each step
        that was made."""
        optimizer, zero = self.optimizer, torch.zeros_like(loss)
        wish = torch.full_like(loss, float(self.mesh.world > 1 and self._wants_to_stop()))
        told = loss if self.mesh.tells_loss else zero
        further = torch.zeros(len(self._names), device=self.device)
        # Ranks that split matrices all know the whole loss of their rows.
        for sums in self._further:
            taken = sums.take()
            further = taken if self.mesh.place["tp"] == 0 else further
        totals = torch.cat([torch.stack([told, wish]), further])
        if self.mesh.world > 1:
            dist.all_reduce(totals)
        blocked = zero if optimizer.overflow is None else optimizer.overflow.blocked
        spiked = zero if optimizer.guard is None else optimizer.spiked
        own = torch.stack([totals[0], norm, totals[1], blocked, spiked])
        return torch.cat([own, totals[2:]])

    def _time_rows(self) -> bool:
        """With the first step after the last capture done: measure what rows cost, and plan by
        that; whether it did. Collective."""
        steps, run, executor = self.microbatches, self.config.run, self.executor
        trial = 0 if executor.prepare is None else executor.prepare.trial_steps
        if (
            not isinstance(steps, PlannedSteps)
            or steps.is_measured
            or self._made != executor.warmup + trial + 1
            or not is_wanted(self.config.parallel.time_rows, self.device, run.deterministic)
        ):
            return False
        timed = time_row(executor.run_step, self.device, slowest_rank(self.mesh))
        with executor.aside(), undisturbed(self.model.chunks, self.device):
            found = measured_cost(steps.request, self.config.model.vocab_size, timed)
        if found.cost is not None:
            self.feed.load_state_dict(self.feed.state_dict())
            steps.plan_by(found.cost)
        # Earlier steps had other plans.
        self._positions = dict.fromkeys(self._positions, self.feed.state_dict())
        self.view.note(found.note)
        return True

    def _report(self, *, leave: int) -> None:
        """Read the numbers of launched steps until `leave` of them are left on the device; write
        and show them."""
        while len(self._launched) > leave:
            step = self._launched[0]
            loss, norm, stopping, blocked, spiked, *further = step.numbers()
            self._others_stopped = self._others_stopped or stopping > 0
            if blocked:
                self._make_again()
                continue
            self._launched.popleft()
            row, number = step.row, step.row["step"]
            unlabelled = not step.has_labels and math.isfinite(loss) and math.isfinite(norm)
            if unlabelled:
                self.view.note(f"step {number}: it has no label, so nothing was learned")
            skipped = not unlabelled and self.spikes.judge(
                number,
                loss,
                norm,
                left_out=spiked > 0,
                policy=self.config.run.on_spike,
                note=self.view.note,
                advise=self._how_to_go_on,
            )
            row |= {"loss": None if unlabelled else finite(loss), "gradient_norm": finite(norm)}
            row |= dict(zip(self._names, map(finite, further), strict=True))
            row |= {"skipped": True} if skipped else {}
            row |= {"unlabelled": True} if unlabelled else {}
            self._labelled = self._labelled or not unlabelled
            try:
                if self.evaluation.is_due(number):  # no later step was launched
                    began = time.perf_counter()
                    self._whereabouts.at("evaluation", number)
                    with self.view.phases.during("evaluating"):
                        row |= self.evaluation.run(number)
                    self.view.note(f"step {number}: {self.evaluation.in_words()}")
                    self._last_end += time.perf_counter() - began  # the time of no step
            finally:
                self._log.write(row)
                self.view.show(row)

    def _make_again(self) -> None:
        """Make room for experts, capture graphs of the new shapes and make all launched steps
        again, in order. Collective; waits for the device. Raises RuntimeError when a step does not
        fit after several attempts."""
        overflow, oldest = self.optimizer.overflow, self._launched[0]
        assert overflow is not None
        with self.executor.rebuilding():
            told = overflow.make_room(whole=oldest.made >= MOST_ATTEMPTS - 1)
        set_random_states(oldest.random, self.device)
        for step in self._launched:
            if step.made >= MOST_ATTEMPTS:
                raise RuntimeError(
                    f"a step did not fit into the room for experts {step.made} times ({told}); "
                    "give more with --parallel.expert-room"
                )
            self.repeated += 1
            self._launch(step)
            step.row["starting"] = True
        self.view.note(f"step {oldest.row['step']} is made again: {told}")

    def _save(self, position: dict[str, Any] | None = None, *, goes_on: bool = False) -> None:
        """Checkpoint the current step once, where there are checkpoints, after all its numbers and
        all weights were found finite.

        position: of the data after this step, None for where they are now. goes_on: training does;
        otherwise all checkpoints are whole when this returns.
        """
        self._report(leave=0)
        began = time.perf_counter()
        if self._saved_at != self.step:
            weights = self.optimizer.flat.kept(self.model.parameters())
            norms = norm_each(weights, float("inf"))
            largest = torch.stack([norm.float() for norm in norms]).max()
            if not everywhere(self.mesh.everyone(), math.isfinite(largest.item())):
                wrong = self.step, "a weight is not finite"
                if self.config.run.on_spike == "rollback":
                    self.spikes.must_go_back(*wrong, self._how_to_go_on)
                raise NonFiniteLossError(self._how_to_go_on(*wrong))
            if self.config.run.checkpoint_every:
                self._write_checkpoint(position, in_background=goes_on)
        if not goes_on:
            with self.view.phases.during("writing the checkpoint"):
                self._saves.wait()
        self._pause += time.perf_counter() - began

    def _write_checkpoint(
        self, position: dict[str, Any] | None = None, *, in_background: bool = False
    ) -> None:
        self._whereabouts.at("save", self.step)
        self.spikes.is_best(self.step)
        self.spikes.returns = 0
        self._saved_at = self.step
        state = {
            "data": position or self.feed.state_dict(),
            "random_device": self.device.type,
            "random_streams": all_streams(self.mesh, sequence=self._splits_rows),
            "graphs": self._graphs(),
            "experts": room_of_experts(self.model, self.config, self.mesh),
            "gradients": self._sums,
            "config": self._stored_config(),
            BASE: next(iter(self._bases), None),
            "spikes": self.spikes.state(),
            "evaluation": self.evaluation.state(),
        }
        self._log.sync()
        with self.view.phases.during(f"saving the checkpoint of step {self.step}"):
            self._saves.write(
                self.step,
                self.tensors() | self._random_states(),
                state,
                self.evaluation.best.step if self.evaluation.enabled else self.spikes.best_step,
                in_background=in_background,
            )

    def _how_to_go_on(self, step: int, what: str) -> str:
        self._saves.settle()
        newest, rate = self._whereabouts.checkpoint, self.config.optimizer.learning_rate
        best = best_checkpoint(self.folder / CHECKPOINTS)
        lowest = "" if best is None or str(best) == newest else f", that of the lowest loss {best}"
        way = (
            f"the last good checkpoint is {newest}{lowest}. Go on from it with a lower learning "
            "rate: --resume "
            if newest
            else "there is no checkpoint yet. Start again with a lower learning rate: "
        )
        return (
            f"step {step}: {what}. Training stopped; {way}--optimizer.learning-rate {rate / 3:.2g} "
            "(or a lower --optimizer.clip-norm), or look at the data of this step"
        )

    def _summary(self, ended: str) -> dict[str, Any]:
        """The content of summary.json."""
        summary = {"ended": ended, "device": str(self.device)} | summarize(self._log.rows)
        summary |= {"spikes": self.spikes.counts(), "documents": self.feed.counts}
        summary |= self.executor.summary() | self._graphs()
        if isinstance(self.microbatches, PlannedSteps):
            summary["context"] = self.microbatches.summary()
        if self.evaluation.enabled:
            summary["evaluation"] = self.evaluation.summary()
        # The mean over more steps, of a longer run, would be another one.
        if "loss_first" in self._summary_before:
            for key in ("loss_first", "loss_first_steps"):  # older summaries do not have the steps
                summary[key] = self._summary_before.get(key)
        return summary

    def _graphs(self) -> dict[str, Any]:
        """Counts of graphs since the start of the run, in all processes that went on with it one
        after another."""
        return add_counts(self._graphs_before, self.executor.totals())
