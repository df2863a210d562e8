"""A training run: documents to packs to graphs to a trained model.

    packs ─▶ take_step ─▶ forward, backward of each ─▶ clip, AdamW
          ─▶ numbers of the step before ─▶ log, checkpoint

The host never waits for the device within a step; the numbers of a step are read after the next one
was launched. Several processes run the same loop over the same packs and take their share of each
step; what they decide by, they agree on. The invariants: a checkpoint never holds the state of a
run whose loss or gradients are not finite, a run that goes on from one is bitwise the run that
never stopped, and a stop by a signal comes between steps.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.models.foreign import in_one_line
from packgraph.models.stack import DecoderStack
from packgraph.parallel.heartbeat import Whereabouts
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.processes import TIMEOUT, on_first
from packgraph.parallel.tensor import dropout_seed
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.checkpoint.background import Saves
from packgraph.train.checkpoint.reader import CheckpointError
from packgraph.train.checkpoint.resume import checkpoint_to_resume, how_to_go_on
from packgraph.train.checkpoint.writer import FoundCheckpoint, load_tensors
from packgraph.train.config.reading import to_dict
from packgraph.train.config.sections import TrainConfig
from packgraph.train.data import DataError, Microbatches, PlannedSteps
from packgraph.train.evaluation import Evaluation
from packgraph.train.executor import add_counts
from packgraph.train.features.context import (
    is_wanted,
    measured_cost,
    put_back,
    rank_tokens,
    slowest_rank,
    time_row,
)
from packgraph.train.features.lora import BASE, base_fingerprint, check_base
from packgraph.train.features.moe import restore_room, room_of_experts
from packgraph.train.features.prediction import FurtherLosses
from packgraph.train.feed import PATIENCE, NoDataError, StepFeed
from packgraph.train.metrics import METRICS, LateFetch, MetricsLog, RowsOnly, finite, summarize
from packgraph.train.node_folders import NodeFolders, checkpoint_here, shared_folder
from packgraph.train.optimizer import CHANGED_SUMS, learning_rate_of, warn_of_sums
from packgraph.train.progress import LeftOut, ProgressView
from packgraph.train.random_state import all_streams, random_states, set_random_states, stream_name
from packgraph.train.retry import StepRetries
from packgraph.train.run_files import read_json, write_json, writing
from packgraph.train.run_folder import CHECKPOINTS, CONFIG, SUMMARY
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import GoBack, NonFiniteLossError, Spikes
from packgraph.train.step import MicrobatchAssignment
from packgraph.train.trackers import NAMES

OPTIMIZER = "optimizer."  # stored names of its state begin so
RANDOM = "random."  # stored names of random states begin so; a rank needs only its own
COMPLETED = "all steps done"
DATA_ENDED = "the data ended"
KEPT_POSITIONS = 4  # steps; one is launched before the numbers of the last are known


@dataclass(frozen=True)
class StepRecord:
    """Host facts of a launched step, kept until its device numbers arrive. Times in seconds.

    microbatches, tokens, loss_tokens and places are those of all replicas; replayed and fallbacks
    those of this rank since the start of the run. checkpoint_pause: part of `seconds` in which the
    step waited for the checkpoint of the step before.
    """

    step: int
    learning_rate: float
    microbatches: int
    tokens: int
    loss_tokens: int
    places: int
    replayed: int
    fallbacks: int
    seconds: float
    data_wait: float
    checkpoint_pause: float
    starting: bool


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
        self.device, self.view, self.mesh = device, view, mesh or single_process()
        self._whereabouts = whereabouts or Whereabouts()
        self._nodes = nodes or shared_folder(self.mesh)
        if config.parallel.dispatcher_name == "symmetric":
            self._whereabouts.limit = (
                TIMEOUT.total_seconds()
            )  # its barriers wait in kernels, for ever
        self._splits_rows = config.parallel.splits_rows
        sharing = MicrobatchAssignment.of(
            self.mesh, rank_tokens(config), in_step=config.replicas_in_step
        )

        def feed(stream: Microbatches) -> StepFeed:
            patience = 0.0 if self.mesh.world == 1 else PATIENCE
            per_step, ahead = config.run.tokens_per_step, config.data.prefetch
            return StepFeed(stream, per_step, sharing, device, ahead, patience)

        self.feed = feed(microbatches)
        torch.manual_seed(dropout_seed(config.run.seed, self.mesh, sequence=self._splits_rows))
        self.model = build_chunks(config, device, self.mesh)
        self._base = base_fingerprint(self.model, self.mesh) if config.lora.enabled else None
        self.optimizer = make_optimizer(self.model, config, self.mesh)
        self._sums, self._tells_sums = config.gradient_dtype(self.mesh.world), True
        self.executor = make_executor(self.model, config, device, self.mesh)
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
        self._repeats = StepRetries(
            self.executor,
            self.optimizer,
            device,
            FurtherLosses(self.model.chunks, config, self.mesh, device),
        )
        self.evaluation = Evaluation(
            config.eval, evaluation, feed, self.executor, self.model, self.optimizer, self.mesh
        )
        self.step = 0
        self._made = 0  # steps that this process has launched
        self._labelled = False  # one of them had a label
        self._resumed_at = 0
        self._fetch = LateFetch(device)
        self._last_end = self._pause = 0.0
        self._saved_at = 0
        self._positions: dict[
            int, dict[str, Any]
        ] = {}  # of the data, after each of the newest steps
        self._others_stopped = False
        self._left_out = LeftOut(self.feed, view)
        self._graphs_before: dict[str, Any] = {}
        self._summary_before: dict[str, Any] = {}

    @property
    def attention(self) -> str:
        """The attention backend in use, and why it is no faster one."""
        return ", ".join(
            dict.fromkeys(
                str(chunk.attention_choice())
                for chunk in self.model.chunks
                if isinstance(chunk, DecoderStack)
            )
        )

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of model and optimizer by flat name."""
        stored = self.model.stored(self.optimizer.flat.gathered())
        model = {f"model.{name}": value for name, value in stored.items()}
        return model | {
            OPTIMIZER + name: value for name, value in self.optimizer.state_tensors().items()
        }

    def resume(self) -> None:
        """Go on from the newest checkpoint of the run, or the best. Raises CheckpointError."""
        find = partial(self._find_checkpoint, best=self.config.run.resume == "best")
        path, step, state, damaged = on_first(self.mesh, find, CheckpointError)
        for told in damaged:
            self.view.note(f"{told}. It is passed over")
        for told in self._load(path, step, state):
            self.view.note(told)
        for told in restore_room(self.model, self.config, self.mesh, state.get("experts", {})):
            self.view.note(told)
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
        told = []
        check_base(path, state, self._base)
        random = random_states(self.device)
        stream = self._stream()
        if state.get("random_streams", ["random"]) == all_streams(
            self.mesh, sequence=self._splits_rows
        ):
            states = {f"{stream}.{name}": value for name, value in random.items()}
            self._load_tensors(path, self.tensors() | states)
            set_random_states(random, self.device)
        else:
            self._load_tensors(path, self.tensors())
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

    def _load_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        with checkpoint_here(path, self.mesh, self._nodes) as here:
            load_tensors(here, tensors, RANDOM, self.mesh)
        self.optimizer.load({name.removeprefix(OPTIMIZER): t for name, t in tensors.items()})

    def _find_checkpoint(self, best: bool = False) -> FoundCheckpoint:
        """The newest whole checkpoint, or the best. Raises CheckpointError."""
        return checkpoint_to_resume(self.folder / CHECKPOINTS, self.device.type, best=best)

    def _stream(self) -> str:
        """Name of the random numbers that this rank draws from."""
        return stream_name(self.mesh.layout.coordinates(self.mesh.rank), sequence=self._splits_rows)

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train until all steps are done, the data ends or `stop` asks. Returns the summary, which
        is also written.

        Raises NonFiniteLossError, CheckpointError, and what the data raise on bad input.
        """
        if (
            self._resumed_at >= self.config.run.steps
            and (summary := self._finished_summary()) is not None
        ):
            self.view.note(
                f"nothing to do: all {self.config.run.steps} steps are done; raise run.steps to go "
                "on"
            )
            # A run that was stopped before is not to be started again.
            stopped = summary.pop("exit_code", None) is not None
            return summary | ({"ended": COMPLETED} if stopped else {})
        for feed in (self.feed, *self.evaluation.feeds.values()):
            feed.stop = stop
        log = self._open_log()
        if log.damaged:
            lines = ", ".join(map(str, log.damaged[:8])) + (" …" if len(log.damaged) > 8 else "")
            self.view.note(
                f"{METRICS}: damaged lines are left out, the others kept (of what it was: {lines})"
            )
        ended = COMPLETED
        try:
            if self.config.run.async_checkpoints and self._saves_on_the_way():
                self._saves.prepare(self._stored_tensors(), self.device)
            self._saved_at, self._last_end = self.step, time.perf_counter()
            if self.config.run.on_spike == "rollback" and not self._whereabouts.checkpoint:
                self._write_checkpoint(log)  # to go back to
            while (done := self._steps(log, stop)) is None:
                log = self._reopened(log)
            ended = done
            if self._made and not self._labelled and not self._resumed_at:
                raise DataError(
                    f"none of the {self.step} steps had a label, so nothing was learned; give rows "
                    "that hold an answer (graph.capacities, data.overlong)"
                )
        except DataError as error:
            # To save takes all ranks.
            together = self._whereabouts.together(f"bad data after step {self.step}")
            if together:
                with contextlib.suppress(GoBack):  # the newest checkpoint stays
                    self._save(
                        log, self._position_after(self.step)
                    )  # the data are in the middle of another step
            if not (together and isinstance(error, NoDataError)):
                raise
            self._others_stopped = True
        finally:
            log.close()
        stopped = self.step < self.config.run.steps and self._must_stop(stop)
        if stopped:
            ended = f"stopped by {stop.reason or 'a signal to another process'}"
        summary = self._summary(log, ended)
        if stopped:
            summary["exit_code"] = stop.exit_code()
        if self.mesh.rank == 0:
            write_json(self.folder / SUMMARY, summary)
        return summary

    def _steps(self, log: MetricsLog | RowsOnly, stop: StopRequest) -> str | None:
        """Train to the end, and save there. Returns why it ended; None if the run has gone back to
        a checkpoint."""
        ended = COMPLETED
        try:
            while self.step < self.config.run.steps and not self._must_stop(stop):
                if self.evaluation.ending is not None:
                    ended = self.evaluation.ending
                    break
                if not self._one_step(stop):
                    ended = DATA_ENDED
                    break
                due = self.evaluation.is_due(self.step)
                self._report(log, leave=0 if due else 1)
                is_best = due and self.evaluation.best.step == self.step
                every = self.config.run.checkpoint_every
                if is_best or (every and self.step % every == 0):
                    self._save(log, goes_on=self.step < self.config.run.steps)
            self._save(log)
        except GoBack as found:
            self._go_back(found)
            return None
        return ended

    def _saves_on_the_way(self) -> bool:
        """Tells whether a checkpoint may be due before the last step."""
        run = self.config.run
        if not run.checkpoint_every:
            return False
        due = (self.step // run.checkpoint_every + 1) * run.checkpoint_every
        return due < run.steps or self.evaluation.enabled  # the best one is saved

    def _go_back(self, found: GoBack) -> None:
        """Load the newest checkpoint; the data go on after the step that went wrong. Collective.

        Steps that were launched after that one are forgotten, and their data come again: what the
        host happened to have launched does not count, so a resumed run goes the same way.
        """
        while len(self._fetch):
            self._fetch.pop()
        self._repeats.forget()
        self._saves.wait()
        self.feed.load_state_dict(self._position_after(found.step))
        spikes, wrong = self.spikes, self.step
        path, step, state, _ = on_first(self.mesh, self._find_checkpoint, CheckpointError)
        self._load(path, step, state)
        self.spikes.seen, self.spikes.rolled_back = spikes.seen + 1, spikes.rolled_back + 1
        self.spikes.returns = spikes.returns + 1
        self._saved_at, self._positions = step, {}
        self.view.note(
            f"step {found.step}: {found}. Back to {path} ({wrong - step} steps), on with other data"
        )

    def _reopened(self, log: MetricsLog | RowsOnly) -> MetricsLog | RowsOnly:
        """The log without the steps behind the one that the run has gone back to."""
        log.close()
        if isinstance(log, MetricsLog):
            return self._metrics_log()
        return RowsOnly([row for row in log.rows if row["step"] <= self.step])

    def close(self) -> None:
        """Wait for a checkpoint that is being written, free all graphs and their memory, and end
        the threads that make steps ahead. Raises CheckpointError."""
        try:
            self._saves.close()
        finally:
            self.feed.close()
            self.evaluation.close()
            self.executor.close()

    def _open_log(self) -> MetricsLog | RowsOnly:
        """Create the folder and the files of the run, on rank 0."""
        if self._nodes.leads(self.mesh.rank):  # for `--config runs/NAME/config.json` there
            write_json(self.folder / CONFIG, self._stored_config())
        if self.mesh.rank != 0:
            return RowsOnly()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._resumed_at:
                for name in (SUMMARY, NAMES):  # of a run that ended before its first checkpoint
                    (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / CONFIG, self._stored_config())
        return self._metrics_log()

    def _metrics_log(self) -> MetricsLog:
        return MetricsLog(
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

    def _must_stop(self, stop: StopRequest) -> bool:
        """Tells whether the run ends here, also because a checkpoint could not be written. Several
        processes find out together, from the numbers of a finished step."""
        return self._wants_to_stop(stop) if self.mesh.world == 1 else self._others_stopped

    def _wants_to_stop(self, stop: StopRequest | bool) -> bool:
        return bool(stop) or self._saves.failed

    def _one_step(self, stop: StopRequest) -> bool:
        """Launch one optimizer step; False when the data ended."""
        self._enter_step()
        rows_timed = self._time_rows()
        self._positions[self.step] = self.feed.state_dict()
        self._positions.pop(self.step - KEPT_POSITIONS, None)
        asked = time.perf_counter()
        fed = self.feed.take()
        data_wait = time.perf_counter() - asked
        batches = fed.packs
        if not batches:
            return False
        self._left_out.watch()
        captured = self.executor.before_step(self._made)
        if captured:
            self._whereabouts.at("replay", self.step + 1)
        for told in (
            self.executor.memory.notes if captured and self.executor.memory is not None else ()
        ):
            self.view.note(told)
        timed = self.executor.tune(batches, self.view.note)
        learning_rate = learning_rate_of(self.config, self.step)
        loss, norm = self._repeats.launch(
            fed.share, fed.loss_tokens, learning_rate, self.spikes.limits(self.step + 1)
        )
        started, self._last_end = self._last_end, time.perf_counter()
        graphs = self._graphs()
        self.step += 1
        self._made += 1
        record = StepRecord(
            step=self.step,
            learning_rate=learning_rate,
            microbatches=len(batches),
            tokens=sum(batch.num_tokens for batch in batches),
            loss_tokens=sum(batch.num_loss_tokens for batch in batches),
            places=sum(batch.capacity.tokens for batch in batches),
            replayed=graphs["replayed"],
            fallbacks=sum(graphs["fallbacks"].values()),
            seconds=self._last_end - started,
            data_wait=data_wait,
            checkpoint_pause=self._pause,
            starting=captured or timed or rows_timed or self._made == 1,
        )
        self._pause = 0.0
        self._fetch.push(record, self._numbers(loss, norm, self._repeats.verdicts(loss), stop))
        self.feed.go_on()
        if self._tells_sums and (narrow := warn_of_sums(self._sums, len(fed.share))):
            self._tells_sums = False
            self.view.note(narrow)
        return True

    def _enter_step(self) -> None:
        """Say what the next step is."""
        done, graph, warmup = self._made, self.config.graph, self.executor.warmup
        phase = "warm-up" if done < warmup else "capture" if done == warmup else "replay"
        self._whereabouts.at(phase if graph.enabled else "training", self.step + 1)

    def _time_rows(self) -> bool:
        """With the first step after the last capture done: measure what rows cost, and plan by
        that; whether it did. Collective."""
        steps, run = self.microbatches, self.config.run
        if (
            not isinstance(steps, PlannedSteps)
            or steps.is_measured
            or self._made != self.executor.settles_after() + 1
            or not is_wanted(self.config.parallel.time_rows, self.device, run.deterministic)
        ):
            return False
        timed = time_row(self.executor, self.device, slowest_rank(self.mesh))
        with put_back(self.model.chunks, self.executor, self.device):
            found = measured_cost(steps.request, self.config.model.vocab_size, timed)
        if found.cost is not None:
            with self.feed.paused():
                steps.plan_by(found.cost)
        self._positions = dict.fromkeys(
            self._positions, self.feed.state_dict()
        )  # earlier steps had other plans
        self.view.note(found.note)
        return True

    def _numbers(
        self, loss: Tensor, norm: Tensor, verdicts: Tensor, stop: StopRequest | bool
    ) -> Tensor:
        """Figures of a step, float32 [5 + D] on the device: loss, norm, how many processes want to
        stop, whether the step changed nothing because experts lacked room, or because of a spike,
        and the losses of further tokens."""
        if self.mesh.world == 1:
            return torch.cat([torch.stack([loss, norm, torch.zeros_like(loss)]), verdicts])
        wish = torch.full_like(loss, float(self._wants_to_stop(stop)))
        told = loss if self.mesh.tells_loss else torch.zeros_like(loss)
        totals = torch.cat([torch.stack([told, wish]), verdicts[2:]])
        dist.all_reduce(totals)
        return torch.cat([torch.stack([totals[0], norm, totals[1]]), verdicts[:2], totals[2:]])

    def _report(self, log: MetricsLog | RowsOnly, *, leave: int) -> None:
        """Read the numbers of launched steps until `leave` of them are left on the device; write
        and show them."""
        while len(self._fetch) > leave:
            record, (loss, norm, stopping, blocked, spiked, *further) = self._fetch.pop()
            self._others_stopped = self._others_stopped or stopping > 0
            if blocked:
                self._again(record)
                continue
            self._repeats.confirm()
            unlabelled = record.loss_tokens == 0 and math.isfinite(loss) and math.isfinite(norm)
            if unlabelled:
                self.view.note(f"step {record.step}: it has no label, so nothing was learned")
            skipped = not unlabelled and self.spikes.judge(
                record.step,
                loss,
                norm,
                left_out=spiked > 0,
                policy=self.config.run.on_spike,
                note=self.view.note,
                advise=self._how_to_go_on,
            )
            row = {
                "step": record.step,
                "loss": None if unlabelled else finite(loss),
                "gradient_norm": finite(norm),
                "learning_rate": record.learning_rate,
                "tokens": record.tokens,
                "places": record.places,
                "microbatches": record.microbatches,
                "replayed": record.replayed,
                "fallbacks": record.fallbacks,
                "seconds": record.seconds,
                "data_wait": record.data_wait,
                "starting": record.starting,
            }
            if record.checkpoint_pause:
                row["checkpoint_pause"] = record.checkpoint_pause
            row |= FurtherLosses.row(further) | ({"skipped": True} if skipped else {})
            row |= {"unlabelled": True} if unlabelled else {}
            self._labelled = self._labelled or not unlabelled
            try:
                if self.evaluation.is_due(record.step):  # no later step was launched
                    row |= self._evaluate(record.step)
            finally:
                log.write(row)
                self.view.show(row)

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate after `step`; what its row gets. The time counts as none of a step."""
        began = time.perf_counter()
        self._whereabouts.at("evaluation", step)
        found = self.evaluation.run(step)
        self.view.note(f"step {step}: {self.evaluation.in_words()}")
        self._last_end += time.perf_counter() - began
        return found

    def _again(self, record: StepRecord) -> None:
        """Make the step of `record` and what was launched after it again, with more room."""
        records = [record, *(self._fetch.pop()[0] for _ in range(len(self._fetch)))]
        told, made = self._repeats.again()
        self.view.note(f"step {record.step} is made again: {told}")
        for again, (loss, norm, verdicts) in zip(records, made, strict=True):
            self._fetch.push(
                replace(again, starting=True),
                self._numbers(loss, norm, verdicts, self._others_stopped),
            )

    def _save(
        self,
        log: MetricsLog | RowsOnly,
        position: dict[str, Any] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Checkpoint the current step once, where there are checkpoints, after all its numbers and
        all weights were found finite.

        position: of the data after this step, None for where they are now. goes_on: training does;
        otherwise all checkpoints are whole when this returns.
        """
        self._report(log, leave=0)
        began = time.perf_counter()
        if self._saved_at != self.step:
            self._check_weights()
            if self.config.run.checkpoint_every:
                self._write_checkpoint(log, position, in_background=goes_on)
        if not goes_on:
            self._saves.wait()
        self._pause += time.perf_counter() - began

    def _check_weights(self) -> None:
        """Raise NonFiniteLossError, or GoBack, if a weight of any rank is not finite."""
        largest = torch.stack(
            [
                norm.float()
                for norm in torch._foreach_norm(
                    self.optimizer.flat.kept(self.model.parameters()),
                    float("inf"),
                )
            ]
        ).max()
        if self.mesh.everyone() is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        if not math.isfinite(largest.item()):
            if self.config.run.on_spike == "rollback":
                self.spikes.must_go_back(self.step, "a weight is not finite", self._how_to_go_on)
            raise NonFiniteLossError(self._how_to_go_on(self.step, "a weight is not finite"))

    def _stored_tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint of this rank holds now."""
        stream = self._stream()
        return self.tensors() | {
            f"{stream}.{name}": value for name, value in random_states(self.device).items()
        }

    def _write_checkpoint(
        self,
        log: MetricsLog | RowsOnly,
        position: dict[str, Any] | None = None,
        *,
        in_background: bool = False,
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
            "experts": room_of_experts(self.model, self.config, self.mesh, self.device),
            "gradients": self._sums,
            "config": self._stored_config(),
            BASE: self._base,
            "spikes": self.spikes.state(),
            "evaluation": self.evaluation.state(),
        }
        log.sync()
        self._saves.write(
            self.step,
            self._stored_tensors(),
            state,
            self.evaluation.best.step if self.evaluation.enabled else self.spikes.best_step,
            in_background=in_background,
        )

    def _position_after(self, step: int) -> dict[str, Any]:
        """Position of the data after `step`, one of the newest."""
        return self._positions.get(step) or self.feed.state_dict()

    def _how_to_go_on(self, step: int, what: str) -> str:
        self._saves.settle()
        kept, rate = self._whereabouts.checkpoint, self.config.optimizer.learning_rate
        return f"step {step}: {what}. " + how_to_go_on(self.folder / CHECKPOINTS, kept, rate)

    def _summary(self, log: MetricsLog | RowsOnly, ended: str) -> dict[str, Any]:
        summary = (
            {"ended": ended, "device": str(self.device)}
            | summarize(log.rows)
            | {"spikes": self.spikes.counts(), "documents": self._left_out.counts()}
        )
        summary |= self.executor.summary() | self._graphs()
        if isinstance(self.microbatches, PlannedSteps):
            summary["context"] = self.microbatches.summary()
        if self.evaluation.enabled:
            summary["evaluation"] = self.evaluation.summary()
        if (
            "loss_first" in self._summary_before
        ):  # the mean over more steps, of a longer run, would be another one
            for key in ("loss_first", "loss_first_steps"):  # older summaries do not have the steps
                summary[key] = self._summary_before.get(key)
        return summary

    def _graphs(self) -> dict[str, Any]:
        """Counts of graphs since the start of the run, in all processes that went on with it one
        after another."""
        return add_counts(self._graphs_before, self.executor.totals())

    def _finished_summary(self) -> dict[str, Any] | None:
        """The summary in the folder if it is that of the step this run has reached, else None."""
        return self._summary_before if self._summary_before.get("steps") == self.step else None
