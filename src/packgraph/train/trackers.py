"""Trackers that show a run's rows besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Rank 0 alone writes. The invariant: a tracker never decides whether a run goes on. What it raises is
said once, and it gets no more rows; only the files of TensorBoard, which lie in the run's folder,
are files of the run: one that cannot be written ends it as metrics.jsonl does.

A run that goes on is the same run there: `trackers.json` has the names by which they know it.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from packgraph.train.config.values import flat
from packgraph.train.outcome import Outcome
from packgraph.train.run_files import RunFileError, read_json, write_json, writing

BOARD = "tensorboard"  # folder of its events
NAMES = "trackers.json"
PROJECT = "packgraph"  # where no environment variable names another one


class Tracker(Protocol):
    """One of them, open for one run."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Take the figures of a step by name."""

    def close(self) -> None:
        """Send or write all that was taken."""


class TensorBoard:
    """Events in the run's folder; those of steps behind `last_step` are cut."""

    def __init__(self, folder: Path, last_step: int, config: Mapping[str, Any], name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / BOARD
        with writing(self._path):
            self._events = SummaryWriter(str(self._path), purge_step=last_step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        with writing(self._path):
            for key, value in values.items():
                self._events.add_scalar(key, value, step)

    def close(self) -> None:
        """See Tracker."""
        with writing(self._path):
            self._events.close()


class WeightsAndBiases:
    """A run of Weights & Biases. WANDB_PROJECT, WANDB_MODE and others are heeded.

    name: by which it is known there; an earlier run of that name goes on.
    """

    def __init__(self, folder: Path, last_step: int, config: Mapping[str, Any], name: str) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=name,
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        # Steps come again after a way back, which its own count of steps would leave out.
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric="step")

    def write(self, values: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class MLflow:
    """A run of MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are heeded.

    name: a tag by which it is found again.
    """

    def __init__(self, folder: Path, last_step: int, config: Mapping[str, Any], name: str) -> None:
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(title)
        experiment = known.experiment_id if known else self._client.create_experiment(title)
        found = self._client.search_runs([experiment], f"tags.packgraph = '{name}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        made = self._client.create_run(experiment, tags={"packgraph": name}, run_name=folder.name)
        self._run = made.info.run_id
        for key, value in flat(config).items():
            self._client.log_param(self._run, key, value)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run, [self._metric(key, value, now, step) for key, value in values.items()]
        )

    def close(self) -> None:
        """See Tracker."""
        self._client.set_terminated(self._run)


TRACKERS: dict[str, Callable[[Path, int, Mapping[str, Any], str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Those of `names` that are not installed, but for tensorboard, which nobody has asked for."""
    return [name for name in names if name != "tensorboard" and find_spec(name) is None]


class Trackers:
    """All trackers of a run."""

    def __init__(
        self,
        folder: Path,
        last_step: int,
        names: Sequence[str],
        config: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        """Open those of `names` that are installed; a note names those that are not, or fail.

        Args:
            folder: The run's folder.
            last_step: The step that the run goes on after; 0 = it begins.
            names: Keys of TRACKERS.
            config: Of the run, nested.
            note: Takes a line for people.
        """
        self._note, self._open = note, dict[str, Tracker]()
        known = read_json(folder / NAMES)
        ids = {name: known.get(name) or secrets.token_hex(8) for name in names}
        if set(ids) - {"tensorboard"}:
            write_json(folder / NAMES, ids)
        for name in names:
            if find_spec(name) is None:
                note(f"{name} gets no rows: it is not installed (pip install {name})")
                continue
            with (outcome := Outcome()):
                self._open[name] = TRACKERS[name](folder, last_step, config, ids[name])
            self._heed(name, outcome.error)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send the row of a step to all of them."""
        values = {
            _tag(key): float(value)
            for key, value in row.items()
            if key != "step" and isinstance(value, (int, float))
        }
        for name, tracker in list(self._open.items()):
            with (outcome := Outcome()):
                tracker.write(values, row["step"])
            self._heed(name, outcome.error)

    def close(self) -> None:
        """Close all of them."""
        for name, tracker in list(self._open.items()):
            with (outcome := Outcome()):
                tracker.close()
            self._heed(name, outcome.error)
        self._open.clear()

    def _heed(self, name: str, error: BaseException | None) -> None:
        """Give up a tracker that has failed; what is of the run's files, or is to end the process,
        is raised again."""
        if error is None:
            return
        if not isinstance(error, Exception) or isinstance(error, RunFileError):
            raise error
        self._open.pop(name, None)
        self._note(
            f"{name} has failed and gets no more rows, the run goes on: "
            f"{type(error).__name__}: {error}"
        )


def _tag(name: str) -> str:
    """Name of a number in trackers: train/loss, eval/loss, eval/loss/SOURCE."""
    kind, underscore, rest = name.partition("_")
    return f"eval/{rest}" if underscore and kind == "eval" else f"train/{name}"
