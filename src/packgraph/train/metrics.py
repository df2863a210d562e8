"""Numbers of a step: fetched from the device one step late, written one line per step.

Reading a device number makes the host wait until the device has computed it, so the host would
never run ahead. The numbers of step n are copied to the host without waiting and read after step n
+ 1 was launched. The invariant of the log: `metrics.jsonl` holds every finished step once, in
order; a resumed run first cuts what lies behind its checkpoint. Every row has a checksum of its
own, so that a row that is read is one that was written.

Trackers show rows besides: TensorBoard, Weights & Biases, MLflow. Rank 0 alone writes. A tracker
never decides whether a run goes on: what it raises is said once, and it gets no more rows; only the
files of TensorBoard, which lie in the run's folder, are files of the run: one that cannot be
written ends it as metrics.jsonl does. A run that goes on is the same run there: `trackers.json` has
the names by which they know it.
"""

import json
import math
import os
import secrets
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from packgraph.models.foreign import naming
from packgraph.train.config.reading import flat
from packgraph.train.run_files import METRICS as METRICS
from packgraph.train.run_files import (
    RunFileError,
    parse_json,
    read_json,
    sync_folder,
    write_json,
    write_synced,
    writing,
)
from packgraph.train.signals import Outcome

BOARD = "tensorboard"  # folder of its events
NAMES = "trackers.json"
PROJECT = "packgraph"  # where no environment variable names another one
CRC = "crc32"  # key of a row's checksum over all its other keys, eight hexadecimal digits
# What a row must have to be one. A loss that is no number is null.
NEEDED = {
    "step": (int,),
    "loss": (float, int, type(None)),
    "tokens": (int,),
    "places": (int,),
    "seconds": (float, int),
    "starting": (bool,),
}
MORE = ("data_wait", "skipped", "unlabelled")  # what a summary also reads


def finite(value: float) -> float | None:
    """Returns `value` for JSON, or None where it is not finite."""
    return value if math.isfinite(value) else None


def fetch_late(values: torch.Tensor) -> Callable[[], list[float]]:
    """Starts to copy a small tensor to the host. Returns what waits for the copy, and gives its
    numbers."""
    if not values.is_cuda:
        return values.detach().clone().tolist
    # Pinned pages come from torch's caching host allocator, which reuses them once the copy has
    # ended.
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values.detach(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def numbers() -> list[float]:
        copied.synchronize()
        return pinned.tolist()

    return numbers


class MetricsLog:
    """`metrics.jsonl`, flushed line by line, and the trackers of a run."""

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int,
        trackers: Sequence[str] = ("tensorboard",),
        config: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Open for appending after `last_step`; lines of later steps, a half-written last line and
        lines that are no rows are cut. The numbers of the last are `damaged`.

        Args:
            folder: The run's folder.
            last_step: The step that the run goes on after; 0 = it begins.
            trackers: Keys of TRACKERS, of which those that are installed are opened; a note names
                those that are not, or fail.
            config: Of the run, nested.
            note: Takes a line for people.
        """
        self._path = folder / METRICS
        found, self.damaged = _read_lines(self._path)
        kept = [row for row in found if row["step"] <= last_step]
        with writing(self._path):
            cut = self._path.with_suffix(".tmp")
            write_synced(cut, "".join(map(_line, kept)))
            os.replace(cut, self._path)
            sync_folder(folder)
            self._stream: IO[str] = self._path.open("a", encoding="utf-8")
        self._note, self._trackers = note, dict[str, "Tracker"]()
        known = read_json(folder / NAMES)
        ids = {name: known.get(name) or secrets.token_hex(8) for name in trackers}
        if set(ids) - {"tensorboard"}:
            write_json(folder / NAMES, ids)
        for name in trackers:
            if find_spec(name) is None:
                note(f"{name} gets no rows: it is not installed (pip install {name})")
                continue
            with (outcome := Outcome()):
                self._trackers[name] = TRACKERS[name](folder, last_step, config or {}, ids[name])
            self._heed(name, outcome.error)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, read from the file: a long run would fill the memory with them."""
        if not self._stream.closed:
            self._stream.flush()
        return read_metrics(self._path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step (JSON-able; `step` is its number)."""
        with writing(self._path):
            self._stream.write(_line(row))
            self._stream.flush()
        # Named train/loss, eval/loss, eval/loss/SOURCE.
        values = {
            f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}": float(value)
            for key, value in row.items()
            if key != "step" and isinstance(value, (int, float))
        }
        self._tell(lambda tracker: tracker.write(values, row["step"]))

    def sync(self) -> None:
        """Wait until the disk has all rows."""
        with writing(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Flush and close the file and all trackers; rows are on the disk then."""
        self.sync()
        with writing(self._path):
            self._stream.close()
        self._tell(lambda tracker: tracker.close())
        self._trackers.clear()

    def _tell(self, tell: Callable[["Tracker"], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with (outcome := Outcome()):
                tell(tracker)
            self._heed(name, outcome.error)

    def _heed(self, name: str, error: BaseException | None) -> None:
        """Give up a tracker that has failed; what is of the run's files, or is to end the process,
        is raised again."""
        if error is None:
            return
        if not isinstance(error, Exception) or isinstance(error, RunFileError):
            raise error
        self._trackers.pop(name, None)
        self._note(
            f"{name} has failed and gets no more rows, the run goes on: "
            f"{type(error).__name__}: {error}"
        )


class RowsOnly:
    """Stands for a MetricsLog on ranks that write nothing: keeps of the rows of this process what a
    summary needs."""

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self.rows: list[dict[str, Any]] = list(rows)
        self.damaged: list[int] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows.append({name: row[name] for name in (*NEEDED, *MORE) if name in row})

    def sync(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, without their checksums; lines that are damaged or half-written
    are left out.

    Files of versions before have no checksums; their rows are taken as they are.
    """
    return _read_lines(path)[0]


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({**row, CRC: _crc(row)}) + "\n"


def _crc(row: Mapping[str, Any]) -> str:
    """The checksum of a row in canonical form: other spaces or another order of keys, as tools
    write them, are the same row."""
    text = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows, and numbers of the lines that are none; not that of a last line which a killed run has
    not ended."""
    if not path.is_file():
        return [], []
    with naming(path, "cannot be read", RunFileError, "repair it, or move it away"):
        text = path.read_text(encoding="utf-8", errors="replace")
    *lines, rest = text.split("\n")
    found = [_parse_row(line) for line in ([*lines, rest] if rest else lines)]
    # A file is written anew when it is opened: where one row has a checksum, all had one.
    has_sums = any(row is not None and is_summed for row, is_summed in found)
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, (row, is_summed) in enumerate(found, start=1):
        if row is not None and (is_summed or not has_sums):
            rows.append(row)
        elif number <= len(lines):
            damaged.append(number)
    return rows, damaged


def _parse_row(line: str) -> tuple[dict[str, Any] | None, bool]:
    """A row without its checksum, None if it is damaged; and whether it has a checksum."""
    try:
        row = parse_json(line)
        if not isinstance(row, dict) or any(
            type(row.get(key)) not in kinds for key, kinds in NEEDED.items()
        ):
            return None, False
        is_summed, expected = CRC in row, row.pop(CRC, None)
        return (row if not is_summed or expected == _crc(row) else None), is_summed
    except (ValueError, RecursionError):
        return None, False


def summarize(rows: Sequence[Mapping[str, Any]], *, window: int = 10) -> dict[str, Any]:
    """The figures of a summary that follow from the rows of all steps.

    loss_first and loss_last are means over the first and last `loss_window` steps that had labels
    and whose update was not left out: `window`, or a quarter of the run if that is less (at least
    one); loss_first_steps and loss_last_steps are those. A resumed run keeps the loss_first of its
    earlier summary. tokens_per_second and data_wait_fraction leave out a run's first step, the one
    that captured and those timed for a choice.
    """
    if not rows:
        return {"steps": 0, "tokens": 0}
    counted = [row for row in rows if not (row.get("skipped") or row.get("unlabelled"))]
    if not counted:
        return {"steps": rows[-1]["step"], "tokens": sum(row["tokens"] for row in rows)}
    count = max(1, min(window, len(counted) // 4))
    ends = {"first": counted[:count], "last": counted[-count:]}
    steady = [row for row in rows if not row["starting"]] or list(rows)
    tokens, places = sum(row["tokens"] for row in rows), sum(row["places"] for row in rows)
    figures: dict[str, Any] = {
        **{f"loss_{end}": sum(row["loss"] for row in some) / count for end, some in ends.items()},
        **{f"loss_{end}_steps": [row["step"] for row in some] for end, some in ends.items()},
        "loss_window": count,
        "steps": rows[-1]["step"],
        "tokens": tokens,
        "tokens_per_second": sum(row["tokens"] for row in steady)
        / max(sum(row["seconds"] for row in steady), 1e-9),
        "padding_fraction": 1 - tokens / places,
    }
    if waits := [row for row in steady if "data_wait" in row]:  # older rows do not say
        seconds = max(sum(row["seconds"] for row in waits), 1e-9)
        figures["data_wait_fraction"] = sum(row["data_wait"] for row in waits) / seconds
    return figures


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
        self._run = import_module("wandb").init(
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
        if found := self._client.search_runs([experiment], f"tags.packgraph = '{name}'"):
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
