"""Checkpoints: whole or not there.

Tensors (model, optimizer, random states) are written by torch.distributed.checkpoint, everything else as JSON;
nothing that is read back can run code (`checkpoint_reader.py`). The invariant: whatever happens while saving (full
disk, kill), the last whole checkpoint stays loadable and `latest` names it. Every rank writes the parts it holds, under
full names and places, so a checkpoint can be read at any other layout; rank 0 alone moves folders.

    checkpoints/
      .writing-step-00000100/   written and fsynced here, then renamed
      step-00000100/            .metadata  __RANK_N.distcp  state.json (with size and SHA-256 of the other files)
      latest                    name of the newest whole checkpoint, replaced atomically
"""
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.processes import on_first
from packgraph.train.checkpoint_reader import CheckpointError, PlainWriter, SafeReader, tensor_entries

FORMAT = "packgraph checkpoint 1"
LATEST = "latest"
STATE = "state.json"
WRITING = ".writing-"
REPLACED = ".replaced-"


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any],
                    keep: int, mesh: Mesh | None = None) -> Path:
    """Write the checkpoint of `step` and keep the newest `keep`. Returns its folder. All processes of `mesh` call it.

    tensors: flat name → tensor (any device or dtype), DTensor or `Pieces`. state: JSON-able, rank 0's is written.
    Source of the rename protocol: POSIX rename(2) is atomic within a file system. Raises CheckpointError (full disk, no
    permission) on all ranks; the earlier ones stay as they are.
    """
    mesh = mesh or single_process()
    name = f"step-{step:08d}"
    writing = folder / (WRITING + name)
    try:
        on_first(mesh, lambda: _begin_writing(folder, writing), OSError)
        _write_tensors(writing, tensors)
        on_first(mesh, lambda: _finish_writing(folder, writing, step, state, keep), OSError)
    except OSError as error:
        if mesh.rank == 0:
            # What fails here as well (a disk that is gone) is removed by the next save.
            shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(
            f"{folder / name}: could not be written: {error.strerror or error}; earlier checkpoints are untouched. "
            "Free some space or choose another run.folder, then go on with --resume") from error
    return folder / name


def _begin_writing(folder: Path, writing: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    writing.mkdir()


def _finish_writing(folder: Path, writing: Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Describe what was written, give it its name, make it the latest and remove the oldest."""
    content = {"format": FORMAT, "step": step, "files": _manifest(writing), "state": dict(state)}
    _write_synced(writing / STATE, json.dumps(content, allow_nan=False))
    _sync_folder(writing)
    name = writing.name.removeprefix(WRITING)
    if (folder / name).exists():
        (folder / name).rename(folder / (REPLACED + name))
    writing.rename(folder / name)
    _write_synced(folder / (WRITING + LATEST), name + "\n")
    os.replace(folder / (WRITING + LATEST), folder / LATEST)
    _sync_folder(folder)
    _remove_leftovers(folder)
    _prune(folder, folder / name, keep)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint `latest` names, else the one with the highest step; None when there is none."""
    _restore_replaced(folder)
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name
        if named.name.startswith("step-") and named.is_dir():
            return named
    return max(folder.glob("step-*"), default=None, key=lambda path: path.name)


def older_whole_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint beside the damaged one at `path` whose files are all as they were written."""
    for other in sorted(path.parent.glob("step-*"), key=lambda found: found.stat().st_mtime_ns, reverse=True):
        if other == path:
            continue
        try:
            load_state(other)
        except CheckpointError:
            continue
        return other
    return None


def load_state(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and JSON state of a checkpoint, after all its files were checked. Raises CheckpointError naming the file."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path / STATE}: cannot be read: {error.strerror}; is this a checkpoint?") from error
    except ValueError as error:
        raise CheckpointError(f"{path / STATE}: damaged: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE}: not a checkpoint of this program (expected format {FORMAT!r})")
    try:
        step, state, files = int(content["step"]), dict(content["state"]), dict(content["files"])
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / STATE}: damaged: {error!r}") from error
    for name, (size, digest) in expected.items():
        _check_file(path / Path(name).name, size, digest)
    return step, state


def load_tensors(path: Path, tensors: Mapping[str, Tensor], optional: str | tuple[str, ...] | None = None,
                 mesh: Mesh | None = None) -> None:
    """Copy a checkpoint into `tensors` in place; names, shapes and dtypes must agree exactly.

    tensors: those of this rank; all processes of `mesh` call it, and together must want all that is stored. optional:
    stored names that start so (or with one of these) may be left out: ranks of another layout had them. Raises
    CheckpointError on all ranks, listing all that does not fit on any of them, before anything was changed.
    """
    stored = tensor_entries(path / ".metadata")
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    everyones = {name: kind for part in _from_all(mesh or single_process(), wanted) for name, kind in part.items()}
    problems = [f"{name} is missing" for name in everyones if name not in stored]
    problems += [f"{name} is not part of this run" for name in stored
                 if name not in everyones and not (optional and name.startswith(optional))]
    for name in everyones.keys() & stored.keys():
        kind, needed = (stored[name].properties.dtype, tuple(stored[name].size)), everyones[name]
        if kind != needed:
            problems.append(f"{name} is {kind[0]} {list(kind[1])}, this run needs {needed[0]} {list(needed[1])}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"{path}: does not fit this run: " + "; ".join(sorted(problems)[:8]) + more)
    try:
        with _single_process_is_meant():
            distributed_checkpoint.load(dict(tensors), storage_reader=SafeReader(path))
    except CheckpointException as error:
        raise CheckpointError(f"{path}: damaged: {_first_failure(error)}") from error


def _from_all(mesh: Mesh, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts (picklable) of every rank; waits for all of them."""
    if mesh.world == 1:
        return [facts]
    found: list[Any] = [None] * mesh.world
    dist.all_gather_object(found, facts)
    return found


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with _single_process_is_meant():
            distributed_checkpoint.save(dict(tensors), storage_writer=PlainWriter(folder, sync_files=True))
    except CheckpointException as error:
        failure = _first_failure(error)
        raise failure if isinstance(failure, OSError) else OSError(_short_of_space(folder, failure)) from error
    except RuntimeError as error:
        raise OSError(_short_of_space(folder, error)) from error


def _short_of_space(folder: Path, failure: BaseException) -> str:
    """Why torch could not write: its own writer says where its bytes ended, not that the disk is full."""
    said = (str(failure).splitlines() or [type(failure).__name__])[0]
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
    except OSError:
        free = "the file system cannot be asked"
    return f"torch could not write all bytes, as on a full disk or beyond a quota ({free}): {said}"


def _first_failure(error: CheckpointException) -> BaseException:
    """The cause of the first failing rank: an exception, wrapped with its traceback."""
    return next(iter(error.failures.values()))[0]


def _single_process_is_meant() -> Any:
    """Torch warns when no process group exists; a run on one device means exactly that."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """File name → size in bytes and SHA-256 of all files of a checkpoint."""
    return {path.name: (path.stat().st_size, _digest(path)) for path in sorted(folder.iterdir())}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_file(path: Path, size: int, digest: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint is damaged")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path}: damaged: {path.stat().st_size} bytes, {size} were written")
    if _digest(path) != digest:
        raise CheckpointError(f"{path}: damaged: its contents are not what was written (SHA-256 differs)")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed or failed save left."""
    _restore_replaced(folder)
    for leftover in (*folder.glob(REPLACED + "*"), *folder.glob(WRITING + "*")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _restore_replaced(folder: Path) -> None:
    """Give a checkpoint that was to be replaced its name back, if the save was killed before the new one came."""
    for leftover in folder.glob(REPLACED + "*"):
        original = folder / leftover.name.removeprefix(REPLACED)
        if not original.exists():
            leftover.rename(original)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove all but the `keep` checkpoints written last (by time: after going back, a lower step is the newer one)."""
    others = [path for path in folder.glob("step-*") if path != newest]
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in others[keep - 1:]:
        doomed = path.rename(folder / (WRITING + path.name))
        shutil.rmtree(doomed)
