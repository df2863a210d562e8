"""The end of a run, for people: how it went, and the commands that go on from there."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from os import environ
from pathlib import Path
from typing import Any

import torch

from packgraph.models.decoder import DecoderConfig
from packgraph.models.hf_config import config_to_json
from packgraph.parallel.processes import Launch
from packgraph.train.metrics import BOARD
from packgraph.train.options import TrainConfig
from packgraph.train.progress import left_out_line
from packgraph.train.run_folder import SUMMARY, has_checkpoint
from packgraph.train.stored_config import CONFIG
from packgraph.train.trainer import COMPLETED, DATA_ENDED


def closing_lines(
    config: TrainConfig, folder: Path, summary: Mapping[str, Any], launch: Launch
) -> list[str]:
    """How the run in `folder` went, by its summary, and what can be done next. launch: of this
    process."""
    lines = [f"{summary['ended']}: {summary['steps']} steps, summary in {folder / SUMMARY}"]
    if "loss_first" in summary:
        first, last = (
            _mean_in_words(summary[f"loss_{end}"], summary.get(f"loss_{end}_steps"))
            for end in ("first", "last")
        )
        lines.append(
            f"loss {first} → {last}, {summary['tokens_per_second']:,.0f} tokens/s, padding "
            f"{summary['padding_fraction']:.1%}, {summary['replayed']} replays, fallbacks "
            f"{summary['fallbacks'] or 'none'}"
        )
    if line := left_out_line(summary.get("documents", {})):
        lines.append(line)
    found = next_commands(config, folder, summary, launch)
    width = max(map(len, found), default=0)
    return lines + [
        f"{what + ':':{width + 1}}  {shlex.join(words)}" for what, words in found.items()
    ]


def next_commands(
    config: TrainConfig, folder: Path, summary: Mapping[str, Any], launch: Launch
) -> dict[str, list[str]]:
    """What can be done after the run in `folder`, with the words of its command."""
    found: dict[str, list[str]] = {}
    steps, ended = summary["steps"], summary["ended"]
    target = folder / f"weights-step-{steps}"
    if has_checkpoint(folder):
        if ended != DATA_ENDED:
            resume = [*_train_program(launch), "train", "--config", str(folder / CONFIG)]
            more = ["--run.steps", str(2 * steps)] if ended == COMPLETED else []
            found["to go on"] = [*resume, "--resume", *more]
        if _is_known_to_transformers(config.model, config.run.dtype) and not target.exists():
            export = [*_program("packgraph", "packgraph.cli"), "export"]
            found["Hugging Face weights"] = [*export, str(folder), str(target)]
    board = folder / BOARD
    if board.is_dir() and any(board.iterdir()):
        words = _program("tensorboard", "tensorboard.main")
        found["curves"] = [*words, "--logdir", str(board)]
    return found


def _mean_in_words(loss: float, steps: Sequence[int] | None) -> str:
    """A mean of losses with the steps it is of; None = not known, of an older version."""
    if steps is None:
        return f"{loss:.4f}"
    first, last = steps[0], steps[-1]
    if first == last:
        return f"{loss:.4f} (step {first})"
    some = "" if len(steps) == last - first + 1 else f"{len(steps)} of the "
    return f"{loss:.4f} (mean of {some}steps {first} to {last})"


def _is_known_to_transformers(model: DecoderConfig, dtype: str) -> bool:
    try:
        config_to_json(model, getattr(torch, dtype))
    except ValueError:
        return False
    return True


def _train_program(launch: Launch) -> list[str]:
    """The words before `train` that start as many processes as `launch` has."""
    if launch.world == 1:
        return _program("packgraph", "packgraph.cli")
    # How several hosts find each other is not known here.
    hosts = (
        ["--nproc-per-node", str(launch.world)] if launch.world == launch.local_world else ["..."]
    )
    return [*_program("torchrun", "torch.distributed.run"), *hosts, "-m", "packgraph.cli"]


def _program(script: str, module: str) -> list[str]:
    """The words that start `script` of this installation, or else `module`."""
    path = Path(sys.executable).with_name(script)
    if not path.exists():
        found = environ.get("PYTHONPATH")
        source = [f"PYTHONPATH={found}"] if found else []
        return [*source, sys.executable, "-m", module]
    if shutil.which(script) == str(path):
        return [script]
    here = Path.cwd()
    return [str(path.relative_to(here) if path.is_relative_to(here) else path)]
