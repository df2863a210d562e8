"""Files of a run: written durably, read with their checksum, and one clear error where that fails.

The disk may fill up at any line of a run, and a file may come back other than it was written. The
invariants: such an end names the file, the cause and the way out, and what was written before stays
usable; a JSON file that a resumed run reads is what was written, or counts as not there.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"  # key of a JSON object's checksum over all its other keys
WRITING = ".writing-"  # folders that are not whole yet, and what is to be removed
WHOLE, SAMPLE, SAMPLES = 2**25, 2**18, 64  # bytes, bytes, number
# In the folder of a run.
CHECKPOINTS, CONFIG, METRICS, SUMMARY = (
    "checkpoints",
    "config.json",
    "metrics.jsonl",
    "summary.json",
)


class RunFileError(RuntimeError):
    """A file or folder of a run that cannot be written or is damaged. The message names it and says
    what to do."""


REMEDY = (
    "Make room there or choose another --run.folder; a run that has a checkpoint goes on by "
    "--resume"
)


@contextmanager
def writing(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Within the block `path` is written; an OSError becomes a RunFileError naming it, and what to
    do."""
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path}: could not be written: {error.strerror or error}. {remedy}"
        ) from error


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object in canonical form, without its own checksum.

    Raises:
        ValueError: If it holds a number that is not finite, or is nested too deeply.
    """
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    try:
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return hashlib.sha256(text.encode()).hexdigest()


def once(named: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON or YAML. Raises ValueError for a name that is there twice."""
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} is there twice")
    return dict(named)


def parse_json(text: str) -> Any:
    """The value in `text`. Raises ValueError, also for what is nested too deeply, and for a name
    that is twice in an object."""
    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_synced(path: Path, text: str) -> None:
    """Write `text` and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has what was written to a file, whoever wrote it, or the renames in a
    folder, where its file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


sync_folder = sync_file


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object and its checksum so that the file is always whole, also after a power
    failure.

    Raises:
        RunFileError: If it cannot be written.
    """
    partial = path.with_suffix(".tmp")
    plain = json.loads(json.dumps(content))
    with writing(path):
        write_synced(partial, json.dumps({**plain, CHECKSUM: checksum(plain)}, indent=2) + "\n")
        os.replace(partial, path)
        sync_folder(path.parent)


def read_json(path: Path, checked: bool = False) -> dict[str, Any]:
    """The JSON object in `path`, without its checksum; empty when there is none or it is not what
    was written.

    An object without a checksum, as versions before and people write it, is taken as it is, but not
    if `checked`: a flipped bit may be in the word "checksum".
    """
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        whole = isinstance(content, dict) and content.get(
            CHECKSUM, None if checked else checksum(content)
        ) == checksum(content)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in content.items() if key != CHECKSUM} if whole else {}


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled_digest(path: Path) -> str:
    """SHA-256 of a file: of all of it up to WHOLE bytes, else of its size and of evenly spread
    samples. Raises OSError.

    The first sample of safetensors holds what begins their header; the last one of Parquet its
    footer: sizes, places and statistics of all columns, which change with the rows.
    """
    if (size := path.stat().st_size) <= WHOLE:
        return digest_of(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek((size - SAMPLE) * number // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()
