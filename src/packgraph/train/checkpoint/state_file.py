"""The file `state.json` of a checkpoint: its step, its state, and what its other files must be.

Plain JSON with a checksum, read without torch. What is written about formats is in `writer.py`.
"""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packgraph.graphs.errors import PackgraphWarning
from packgraph.train.config.reading import true_of
from packgraph.train.run_files import CHECKSUM, checksum, parse_json, write_synced

FORMAT, OLD_FORMAT = "packgraph checkpoint 2", "packgraph checkpoint 1"
STATE, METADATA = "state.json", ".metadata"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or is damaged, foreign or unfit for this run. The message
    names the file."""


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's folder is named after; None for other folders."""
    match = re.fullmatch(r"step-(\d{8,18})", path.name)
    return int(match[1]) if match else None


def checkpoints_by_step(folder: Path) -> list[Path]:
    """All checkpoints, the highest step first."""
    return sorted(
        (path for path in folder.glob("step-*") if step_of(path) is not None),
        key=lambda path: step_of(path) or 0,
        reverse=True,
    )


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a state.json, and its checksum. Raises OSError."""
    plain = json.loads(json.dumps(content, allow_nan=False))
    write_synced(path, json.dumps({**plain, CHECKSUM: checksum(plain)}))


def read_state(path: Path) -> tuple[int, dict[str, Any], dict[str, tuple[int, str]]]:
    """The state.json of the checkpoint at `path`; its other files are not looked at.

    Returns:
        Its step, its state, and the name of each file with its size in bytes and SHA-256.

    Raises:
        CheckpointError: If it cannot be read, or is not what was written.
    """
    file = path / STATE
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file}: damaged: it is no file")
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") not in (FORMAT, OLD_FORMAT):
            raise CheckpointError(
                f"{file}: not a checkpoint of this program (expected format {FORMAT!r})"
            )
        expected = checksum(content)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}; is this a checkpoint?"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error
    if content["format"] == OLD_FORMAT and CHECKSUM not in content:
        warnings.warn(
            f"{file}: written before state.json had a checksum; damage of it may go unnoticed "
            "until the next checkpoint",
            PackgraphWarning,
            stacklevel=2,
        )
    elif content.get(CHECKSUM) != expected:
        raise CheckpointError(
            f"{file}: damaged: its contents are not what was written (its checksum differs)"
        )
    values: Any = (content.get(name) for name in ("step", "state", "files"))
    step, state, files = values
    listed = files if isinstance(files, dict) else {}
    bad = [name for name, entry in listed.items() if not _is_entry(name, entry)]
    problems = true_of(
        {
            f"its step is {step!r}": type(step) is not int or not 0 <= step < 10**18,
            f"it is of step {step}, its folder is of step {step_of(path)}": step_of(path)
            not in (None, step),
            "it has no state": not isinstance(state, dict),
            f"its list of files lacks {METADATA}": METADATA not in listed,
            f"{(*bad, '')[0]!r} has no size and SHA-256 in its list of files": bool(bad),
        }
    )
    if problems:
        raise CheckpointError(f"{file}: damaged: {problems[0]}")
    return step, state, {name: (size, digest) for name, (size, digest) in listed.items()}


def _is_entry(name: str, entry: Any) -> bool:
    """Tells whether a file's name, size and SHA-256 are written as they are to be."""
    match entry:
        case [int(size), str(digest)] if type(size) is int and size >= 0:
            return Path(name).name == name and re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    return False
