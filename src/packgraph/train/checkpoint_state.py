"""`state.json` of a checkpoint: step, JSON state, and what its other files must be.

The invariant: a checkpoint that is read is the one that was written. `state.json` holds a checksum
over its own content and size and SHA-256 of every other file; `.metadata` and every file that it
names must be among them. A shard that rank 0 cannot see when it writes this file is an error then,
not when somebody resumes.

Format 1 had no checksum over `state.json` itself. It is still read, with a warning, so that runs
under way can go on; a file that has a checksum is checked whatever its format says.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packgraph.graphs.errors import PackgraphWarning
from packgraph.train.checkpoint_reader import (
    CheckpointError,
    check_extents,
    files_of,
    read_metadata_file,
)
from packgraph.train.run_files import CHECKSUM, checksum, parse_json, write_synced

FORMAT, OLD_FORMAT = "packgraph checkpoint 2", "packgraph checkpoint 1"
STATE, METADATA = "state.json", ".metadata"
WRITING = ".writing-"  # folders that are not whole yet, and what is to be removed


class StoredState(NamedTuple):
    """A state.json. files: name → size in bytes and SHA-256."""

    step: int
    state: dict[str, Any]
    files: dict[str, tuple[int, str]]


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's folder is named after; None for other folders."""
    match = re.fullmatch(r"step-(\d{8,18})", path.name)
    return int(match[1]) if match else None


def describe(
    folder: Path, step: int, state: Mapping[str, Any], sent: Mapping[str, str] | None = None
) -> None:
    """Write state.json for the files in `folder`, after all that its metadata name were found.

    Args:
        folder: The folder of the checkpoint, which is being written.
        step: Its step.
        state: What is to be stored besides tensors; JSON-able.
        sent: SHA-256 of the files that have come from other nodes.

    Raises:
        CheckpointError: If files are missing that other processes have written.
        OSError: If it cannot be written.
    """
    found = read_metadata_file(folder / METADATA)
    missing = [name for name in files_of(found) if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise CheckpointError(
            f"{folder}: {shown}: written by other processes, but not to be seen by rank 0: the "
            "checkpoint would not be "
            "whole. All nodes must write to one shared file system: give a path on it as "
            "--run.folder, or say --run.per-node-folder"
        )
    files = {path.name: (path.stat().st_size, digest_of(path)) for path in sorted(folder.iterdir())}
    if changed := [name for name, digest in (sent or {}).items() if files[name][1] != digest]:
        raise CheckpointError(f"{folder / changed[0]}: is not what its rank has sent")
    check_extents(found, {name: size for name, (size, _) in files.items()}, folder / METADATA)
    write_state(
        folder / STATE, {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
    )


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a state.json, and its checksum. Raises OSError."""
    plain = json.loads(json.dumps(content, allow_nan=False))
    write_synced(path, json.dumps({**plain, CHECKSUM: checksum(plain)}))


def read_state(path: Path) -> StoredState:
    """The state.json of the checkpoint at `path`; its other files are not looked at. Raises
    CheckpointError."""
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
            "until the next "
            "checkpoint",
            PackgraphWarning,
            stacklevel=2,
        )
    elif content.get(CHECKSUM) != expected:
        raise CheckpointError(
            f"{file}: damaged: its contents are not what was written (its checksum differs)"
        )
    return StoredState(_step(content, path), _state(content, file), _files(content, file))


def check_files(path: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Hold all files of the checkpoint at `path` against its manifest. Raises CheckpointError
    naming the file."""
    for name, (size, digest) in files.items():
        _check_file(path / name, size, digest)
    found = read_metadata_file(path / METADATA)
    missing = [name for name in files_of(found) if name not in files]
    if missing:
        raise CheckpointError(
            f"{path / STATE}: damaged: it does not list {', '.join(missing[:8])}, which hold "
            "tensors"
        )
    check_extents(found, {name: size for name, (size, _) in files.items()}, path / METADATA)


def _step(content: Mapping[str, Any], path: Path) -> int:
    step, named = content.get("step"), step_of(path)
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointError(f"{path / STATE}: damaged: its step is {step!r}")
    if named is not None and named != step:
        raise CheckpointError(
            f"{path / STATE}: damaged: it is of step {step}, its folder is of step {named}"
        )
    return step


def _state(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    state = content.get("state")
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: damaged: it has no state")
    return state


def _files(content: Mapping[str, Any], file: Path) -> dict[str, tuple[int, str]]:
    files = content.get("files")
    if not isinstance(files, dict) or METADATA not in files:
        raise CheckpointError(f"{file}: damaged: its list of files lacks {METADATA}")
    for name, entry in files.items():
        good = (
            Path(name).name == name
            and isinstance(entry, list)
            and len(entry) == 2
            and type(entry[0]) is int
            and entry[0] >= 0
            and isinstance(entry[1], str)
            and re.fullmatch(r"[0-9a-f]{64}", entry[1])
        )
        if not good:
            raise CheckpointError(
                f"{file}: damaged: {name!r} has no size and SHA-256 in its list of files"
            )
    return {name: (size, digest) for name, (size, digest) in files.items()}


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_file(path: Path, size: int, digest: str) -> None:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; the checkpoint is damaged")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path}: damaged: {path.stat().st_size} bytes, {size} were written"
            )
        if digest_of(path) != digest:
            raise CheckpointError(
                f"{path}: damaged: its contents are not what was written (SHA-256 differs)"
            )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
