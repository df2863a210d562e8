"""The folder of a run: which one it is, and that no finished work is overwritten.

    runs/NAME/  config.json  metrics.jsonl  tensorboard/  checkpoints/  summary.json

A name given by the user that exists already is refused without `--resume`. A name derived from the preset is made
unique: qwen3-tiny, qwen3-tiny-2, qwen3-tiny-3 …; `--resume` without a name takes the last of them. Nothing is
created before the configuration and the data were found good.
"""
import json
import os
import re
from pathlib import Path
from typing import Any

from packgraph.train.config import ConfigError, differences, to_dict
from packgraph.train.metrics import METRICS
from packgraph.train.options import TrainConfig

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
SUMMARY = "summary.json"

# What may differ when a run goes on: how long it runs, what is written and where, not what it learns.
# Graphs compute what eager training computes, data are compared by their contents, and checkpoints know no layout.
FREE_ON_RESUME = ("run.name", "run.folder", "run.resume", "run.steps", "run.log_every", "run.checkpoint_every",
                  "run.keep_checkpoints", "run.device", "graph.enabled", "graph.backend", "graph.warmup", "graph.slots",
                  "graph.strict", "graph.scope", "graph.granularity", "data.path", "parallel.dp", "parallel.tp",
                  "parallel.pp", "parallel.sequence")


def choose_folder(config: TrainConfig) -> Path:
    """The folder this run is to be written to; creates nothing. Raises ConfigError if it is taken or missing."""
    parent, name = Path(config.run.folder), config.run.name
    if name is not None:
        folder = parent / name
        if config.run.resume and not folder.is_dir():
            raise ConfigError([f"--resume: there is no run {folder}"])
        if not config.run.resume and folder.exists():
            raise ConfigError([f"{folder} exists already; choose another --run.name, or go on with it by --resume"])
        return folder
    taken = _numbered(parent, config.preset)
    if config.run.resume:
        if not taken:
            raise ConfigError([f"--resume: there is no run of preset {config.preset} in {parent}"])
        return taken[max(taken)]
    number = max(taken, default=0) + 1
    return parent / (config.preset if number == 1 else f"{config.preset}-{number}")


def run_of(config: Path) -> dict[str, Any]:
    """The values that say which run a config file belongs to; none for a file that is no run's config.json."""
    folder = config.parent if config.parent.name not in ("", "..") else config.resolve().parent
    if config.name != CONFIG or not any((folder / name).exists() for name in (CHECKPOINTS, METRICS, SUMMARY)):
        return {}
    return {"run": {"name": folder.name, "folder": str(folder.parent)}}


def _numbered(parent: Path, preset: str) -> dict[int, Path]:
    """Existing folders PRESET and PRESET-N by number (PRESET is 1)."""
    found: dict[int, Path] = {}
    for path in parent.glob(preset + "*"):
        match = re.fullmatch(re.escape(preset) + r"(?:-(\d+))?", path.name)
        if match is not None:
            found[int(match[1] or 1)] = path
    return found


def check_same_run(folder: Path, config: TrainConfig) -> None:
    """Raise ConfigError listing all values that must not change when the run in `folder` goes on."""
    path = folder / CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read, so this run cannot go on: {error}"]) from error
    changed = differences(stored, json.loads(json.dumps(to_dict(config))))
    problems = [f"{key}: the run has {before!r}, now it is {after!r}"
                for key, (before, after) in changed.items() if key not in FREE_ON_RESUME]
    if problems:
        raise ConfigError([*problems, f"a resumed run must be the same; take its values by --config {path}"])


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no whole one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that the file is always whole: a temporary file, then an atomic rename."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
