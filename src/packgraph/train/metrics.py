"""Numbers of a step: fetched from the device one step late, written one line per step.

Reading a device number makes the host wait until the device has computed it, so the host would never run ahead. The
numbers of step n are copied to the host without waiting and read after step n + 1 was launched. The invariant of the
log: `metrics.jsonl` holds every finished step once, in order; a resumed run first cuts what lies behind its
checkpoint.
"""
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from packgraph.train.run_files import RunFileError, writing

METRICS = "metrics.jsonl"
# What a row must have for a run to go on after it.
NEEDED = {"step": (int,), "loss": (float, int), "tokens": (int,), "places": (int,), "seconds": (float, int),
          "starting": (bool,)}


class LateFetch:
    """Copies one small float32 tensor per step to the host; `pop` gives the oldest one not yet read."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._waiting: list[tuple[Any, Tensor, torch.cuda.Event | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, label: Any, values: Tensor) -> None:
        """Start copying `values`; `label` comes back with them."""
        if not self._on_cuda:
            self._waiting.append((label, values.detach().clone(), None))
            return
        # Pinned pages come from torch's caching host allocator, which reuses them once the copy has ended.
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append((label, pinned, copied))

    def pop(self) -> tuple[Any, list[float]]:
        """The oldest label and its values; waits for their copy only."""
        label, values, copied = self._waiting.pop(0)
        if copied is not None:
            copied.synchronize()
        return label, values.tolist()


class MetricsLog:
    """`metrics.jsonl`, flushed line by line, and TensorBoard events where tensorboard is installed."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """Open for appending after `last_step`; lines of later steps and a half-written last line are cut."""
        self._path, self._board_path = folder / METRICS, folder / "tensorboard"
        self.rows = [row for row in read_metrics(self._path) if row["step"] <= last_step]
        with writing(self._path):
            cut = self._path.with_suffix(".tmp")
            cut.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
            os.replace(cut, self._path)
            self._stream: IO[str] = self._path.open("a", encoding="utf-8")
        with writing(self._board_path):
            self._board = _open_board(self._board_path, last_step)

    @property
    def has_board(self) -> bool:
        """Whether TensorBoard events are written."""
        return self._board is not None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step (JSON-able; `step` is its number)."""
        self.rows.append(dict(row))
        with writing(self._path):
            self._stream.write(json.dumps(row) + "\n")
            self._stream.flush()
        with writing(self._board_path):
            for name, value in row.items() if self._board is not None else ():
                if name != "step":
                    self._board.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        """Flush and close both files."""
        with writing(self._path):
            self._stream.close()
        with writing(self._board_path):
            if self._board is not None:
                self._board.close()


class RowsOnly:
    """Stands for a MetricsLog on ranks that write nothing: keeps the rows of this process."""

    has_board = True

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows.append(dict(row))

    def close(self) -> None:
        """Nothing is open."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; stops at a half-written one, which a killed run may leave at the end.

    Raises RunFileError naming the line that is no row of a run.
    """
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict) or any(type(row.get(key)) not in kinds for key, kinds in NEEDED.items()):
            raise RunFileError(f"{path}:{number}: not a row of a run (it needs {', '.join(NEEDED)}); remove the line, "
                               "or move the file away to go on without the figures so far")
        rows.append(row)
    return rows


def _open_board(path: Path, last_step: int) -> Any:
    """A TensorBoard writer, or None where tensorboard is not installed (the trainer says so once)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(path), purge_step=last_step + 1)


def summarize(rows: Sequence[Mapping[str, Any]], *, window: int = 10) -> dict[str, Any]:
    """The figures of a summary that follow from the rows of all steps.

    loss_first and loss_last are means over the first and last `loss_window` steps: `window`, or a quarter of the run
    if that is less (at least one). A resumed run keeps the loss_first of its earlier summary.
    tokens_per_second leaves out a run's first step, the one that captured and those timed for a choice.
    """
    if not rows:
        return {"steps": 0, "tokens": 0}
    count = max(1, min(window, len(rows) // 4))
    losses = [row["loss"] for row in rows]
    steady = [row for row in rows if not row["starting"]] or list(rows)
    tokens, places = sum(row["tokens"] for row in rows), sum(row["places"] for row in rows)
    return {
        "loss_first": sum(losses[:count]) / count,
        "loss_last": sum(losses[-count:]) / count,
        "loss_window": count,
        "steps": rows[-1]["step"],
        "tokens": tokens,
        "tokens_per_second": sum(row["tokens"] for row in steady) / max(sum(row["seconds"] for row in steady), 1e-9),
        "padding_fraction": 1 - tokens / places,
    }
