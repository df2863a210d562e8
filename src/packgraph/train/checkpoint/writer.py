"""Checkpoints: whole or not there.

Tensors (model, optimizer, random states) are written by torch.distributed.checkpoint, everything
else as JSON; nothing that is read back can run code (`reader.py`). The invariant:
whatever happens while saving (full disk, kill), the last whole checkpoint stays loadable and
`latest` names it. Every rank writes the parts it holds, under full names and places, so a
checkpoint can be read at any other layout; rank 0 alone moves folders.

    checkpoints/
      .writing-step-00000100/   written and fsynced here, then renamed
      step-00000100/            .metadata  __RANK_N.distcp  state.json
      latest                    name of the newest whole checkpoint, replaced atomically
      best                      name of the one with the lowest loss, which stays

Checkpoints are ordered by step: clocks can be set back. A run that went back to a lower step has
left what it had computed after it, as metrics.jsonl is cut there, too. So its next save removes the
checkpoints of higher steps: all that are left are of one history, and the highest step is the
newest, also when `latest` is lost.

`state.json` holds step and JSON state, and what the other files must be, so that a checkpoint that
is read is the one that was written: a checksum
over its own content and size and SHA-256 of every other file; `.metadata` and every file that it
names must be among them. A shard that rank 0 cannot see when it writes this file is an error then,
not when somebody resumes.

Format 1 had no checksum over `state.json` itself. It is still read, with a warning, so that runs
under way can go on; a file that has a checksum is checked whatever its format says.
"""

import contextlib
import os
import pickle
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as distributed
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from packgraph.parallel.heartbeat import is_broken_connection
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.ranks import from_all, on_each, on_first
from packgraph.train.checkpoint.reader import (
    PlainWriter,
    SafeReader,
    check_extents,
    files_of,
    read_metadata_file,
    tensor_entries,
)
from packgraph.train.checkpoint.state_file import (
    FORMAT,
    METADATA,
    STATE,
    CheckpointError,
    checkpoints_by_step,
    read_state,
    step_of,
    write_state,
)
from packgraph.train.config.reading import shown
from packgraph.train.node_folders import NodeFolders, gather_shards, shared_folder
from packgraph.train.run_files import (
    WRITING,
    digest_of,
    sync_file,
    sync_folder,
    write_synced,
)

COPY_AHEAD = 10_000_000  # bytes that torch's writer copies to the host before they are written


class FoundCheckpoint(NamedTuple):
    """A whole checkpoint. damaged: what is wrong with each newer one that was passed over."""

    path: Path
    step: int
    state: dict[str, Any]
    damaged: tuple[str, ...]


def describe(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    sent: Mapping[str, str],
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
    if missing := [name for name in files_of(found) if not (folder / name).is_file()]:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise CheckpointError(
            f"{folder}: {', '.join(missing[:8])}{more}: written by other processes, but not to be "
            "seen by rank 0: the checkpoint would not be whole. All nodes must write to one shared "
            "file system: give a path on it as --run.folder, or say --run.per-node-folder"
        )
    files = {path.name: (path.stat().st_size, digest_of(path)) for path in sorted(folder.iterdir())}
    if changed := [name for name, digest in sent.items() if files[name][1] != digest]:
        raise CheckpointError(f"{folder / changed[0]}: is not what its rank has sent")
    check_extents(found, {name: size for name, (size, _) in files.items()}, folder / METADATA)
    content = {"format": FORMAT, "step": step, "files": files, "state": dict(state)}
    write_state(folder / STATE, content)


def check_files(path: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Hold all files of the checkpoint at `path` against its manifest. Raises CheckpointError
    naming the file."""
    for name, (size, digest) in files.items():
        file = path / name
        try:
            if not file.is_file():
                raise CheckpointError(f"{file}: missing; the checkpoint is damaged")
            if (found := file.stat().st_size) != size:
                raise CheckpointError(f"{file}: damaged: {found} bytes, {size} were written")
            if digest_of(file) != digest:
                raise CheckpointError(
                    f"{file}: damaged: its contents are not what was written (SHA-256 differs)"
                )
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    stored = read_metadata_file(path / METADATA)
    if missing := [name for name in files_of(stored) if name not in files]:
        raise CheckpointError(
            f"{path / STATE}: damaged: it does not list {', '.join(missing[:8])}, which hold "
            "tensors"
        )
    check_extents(stored, {name: size for name, (size, _) in files.items()}, path / METADATA)


LATEST = "latest"
BEST = "best"
REPLACED = ".replaced-"


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
    mesh: Mesh | None = None,
    best: int | None = None,
    nodes: NodeFolders | None = None,
    pinned: Collection[int] = (),
    *,
    staged: bool = False,
) -> Path:
    """Write the checkpoint of `step`; keep the newest `keep` and that of step `best`, if there is
    one. Collective.

    tensors: flat name → tensor (any device or dtype), DTensor or `Pieces`. state: JSON-able, rank
    0's is written. nodes: which ranks see the same folder, all of them by default; the checkpoint
    is rank 0's. pinned: steps whose checkpoints stay, too. staged: all tensors are on the host, and
    nothing is asked of another device. Returns the checkpoint's folder. Source of the rename
    protocol: POSIX rename(2) is atomic within a file system. Raises CheckpointError (full disk, no
    permission, shards of other ranks that rank 0 does not see) on all ranks; the earlier ones stay
    as they are. A connection to another rank that breaks is no such error, and is raised as it is.
    """
    mesh = mesh or single_process()
    nodes = nodes or shared_folder(mesh)
    name = _name(step)
    writing, leads = folder / (WRITING + name), nodes.leads(mesh.rank)
    try:
        # Rank 0 comes last: what it makes stays, even if another node's folder is its own after
        # all.
        if nodes.others:
            on_each(mesh, lambda: _begin_writing(folder, writing) if leads else None, OSError)
        on_first(mesh, lambda: _begin_writing(folder, writing), OSError)
        _write_tensors(writing, tensors, mesh, staged)
        sent = gather_shards(writing, mesh, nodes)
        on_first(
            mesh,
            lambda: _finish_writing(folder, writing, step, state, keep, best, pinned, sent),
            OSError,
            CheckpointError,
        )
    except CheckpointError:
        # Where the folder is not shared, each rank has one of its own.
        shutil.rmtree(writing, ignore_errors=True)
        raise
    except OSError as error:
        if mesh.rank == 0 or leads:
            # What fails here as well (a disk that is gone) is removed by the next save.
            shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(
            f"{folder / name}: could not be written: {error.strerror or error}; earlier "
            "checkpoints are untouched. "
            "Free some space or choose another run.folder, then go on with --resume"
        ) from error
    if leads:
        shutil.rmtree(writing, ignore_errors=True)  # its shards are on the node of rank 0
    return folder / name


def _begin_writing(folder: Path, writing: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    remove_leftovers(folder)
    writing.mkdir()


def _finish_writing(
    folder: Path,
    writing: Path,
    step: int,
    state: Mapping[str, Any],
    keep: int,
    best: int | None,
    pinned: Collection[int],
    sent: Mapping[str, str],
) -> None:
    """Describe what was written, give it its name, make it the latest and remove the oldest."""
    for path in writing.iterdir():  # torch syncs a file before it writes what its buffer holds yet
        sync_file(path)
    describe(writing, step, state, sent)
    sync_folder(writing)
    name = writing.name.removeprefix(WRITING)
    if (folder / name).exists():
        (folder / name).rename(folder / (REPLACED + name))
    writing.rename(folder / name)
    _point(folder, LATEST, name)
    if best is not None and (folder / _name(best)).is_dir():
        _point(folder, BEST, _name(best))
    sync_folder(folder)
    remove_leftovers(folder)
    _prune(folder, step, keep, {*pinned, best})


def _point(folder: Path, pointer: str, name: str) -> None:
    write_synced(folder / (WRITING + pointer), name + "\n")
    os.replace(folder / (WRITING + pointer), folder / pointer)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint `latest` names, else the one with the highest step; None when there is
    none."""
    _restore_replaced(folder)
    return _pointed(folder, LATEST) or next(iter(checkpoints_by_step(folder)), None)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint `best` names; None when there is none."""
    return _pointed(folder, BEST)


def _pointed(folder: Path, pointer: str) -> Path | None:
    if not (folder / pointer).is_file():
        return None
    named = (
        folder / Path((folder / pointer).read_text(encoding="utf-8", errors="replace").strip()).name
    )
    return named if step_of(named) is not None and named.is_dir() else None


def newest_whole_checkpoint(folder: Path, needed: Collection[str] = ()) -> FoundCheckpoint | None:
    """The checkpoint `latest` names if it is as it was written, else the next lower one that is;
    None without any.

    Args:
        folder: The folder of all checkpoints of a run.
        needed: Keys that its state must have.

    Raises:
        CheckpointError: If there are checkpoints and none of them is whole, naming the damage of
            the newest.
    """
    if (newest := latest_checkpoint(folder)) is None:
        return None
    limit = step_of(newest) or 0
    others = [path for path in checkpoints_by_step(folder) if path != newest]
    # Higher steps than the named one are of a history that the run has left; they come last.
    others.sort(key=lambda path: (step_of(path) or 0) > limit)
    damaged: list[str] = []
    for path in (newest, *others):
        try:
            return FoundCheckpoint(path, *load_state(path, needed), tuple(damaged))
        except CheckpointError as error:
            damaged.append(str(error))
    raise CheckpointError(f"{damaged[0]}; there is no other checkpoint that is whole in {folder}")


def load_state(path: Path, needed: Collection[str] = ()) -> tuple[int, dict[str, Any]]:
    """Step and JSON state of a checkpoint, after all its files were checked. needed: keys that the
    state must have. Raises CheckpointError naming the file."""
    step, state, files = read_state(path)
    check_files(path, files)
    if missing := [key for key in needed if key not in state]:
        raise CheckpointError(f"{path / STATE}: damaged: it has no {', '.join(missing)}")
    return step, state


def load_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    optional: str | tuple[str, ...] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Copy a checkpoint into `tensors` in place; names, shapes and dtypes must agree exactly.

    tensors: those of this rank; all processes of `mesh` call it, and together must want all that is
    stored. optional: stored names that start so (or with one of these) may be left out: ranks of
    another layout had them. Raises CheckpointError on all ranks, listing all that does not fit on
    any of them, before anything was changed.
    """
    stored = tensor_entries(path / METADATA)
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    everyones = {
        name: kind
        for part in from_all(mesh or single_process(), wanted)
        for name, kind in part.items()
    }
    problems = [f"{name} is missing" for name in everyones if name not in stored]
    problems += [
        f"{name} is not part of this run"
        for name in stored
        if name not in everyones and not (optional and name.startswith(optional))
    ]
    for name in everyones.keys() & stored.keys():
        kind, needed = (stored[name].properties.dtype, tuple(stored[name].size)), everyones[name]
        if kind != needed:
            problems.append(
                f"{name} is {kind[0]} {shown(list(kind[1]))}, this run needs {needed[0]} "
                f"{list(needed[1])}"
            )
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"{path}: does not fit this run: " + "; ".join(sorted(problems)[:8]) + more
        )
    try:
        # Torch warns when no process group exists; a run on one device means exactly that.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            distributed_checkpoint.load(dict(tensors), storage_reader=SafeReader(path))
    except CheckpointException as error:
        failure, what = _first_failure(error)
        if isinstance(failure, pickle.UnpicklingError):  # torch would advise to load it
            what = "a shard holds something else than tensors"
        raise CheckpointError(f"{path}: damaged: {what}") from error


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh, staged: bool = False
) -> None:
    # A writer that copies ahead synchronises with a stream of CUDA, also for tensors of the host.
    ahead = 0 if staged else COPY_AHEAD
    writer = PlainWriter(folder, sync_files=True, per_thread_copy_ahead=ahead)
    writer.reset()
    try:
        # What `save` does, but for a warning in a single process: filters of warnings belong to the
        # whole process, and are not to be changed beside another thread.
        _save_state_dict(
            dict(tensors), writer, mesh.host_group, no_dist=not distributed.is_initialized()
        )
    except (CheckpointException, RuntimeError) as error:
        if is_broken_connection(error):
            raise
        failure, said = _first_failure(error)
        if isinstance(failure, OSError):
            raise failure from error
        # torch's writer says where its bytes ended, not that the disk is full.
        free = "the file system cannot be asked"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
        raise OSError(
            f"torch could not write all bytes, as on a full disk or beyond a quota ({free}): {said}"
        ) from error


def _first_failure(error: BaseException) -> tuple[BaseException, str]:
    """The cause of the first failing rank, which torch wraps with its traceback, and its first
    line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error, (str(error).splitlines() or [type(error).__name__])[0]


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed or failed save left in the folder of all checkpoints, if there is one.
    Only for the process that writes the run. Raises OSError."""
    _restore_replaced(folder)
    for leftover in (*folder.glob(REPLACED + "*"), *folder.glob(WRITING + "*")):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _restore_replaced(folder: Path) -> None:
    """Give a checkpoint that was to be replaced its name back, if the save was killed before the
    new one came."""
    for leftover in folder.glob(REPLACED + "*"):
        original = folder / leftover.name.removeprefix(REPLACED)
        if not original.exists():
            leftover.rename(original)


def _prune(folder: Path, newest: int, keep: int, pinned: Collection[int | None]) -> None:
    """Keep the `keep` highest steps up to `newest`, which was just saved, and those of `pinned`;
    higher ones are of a history left behind."""
    known = checkpoints_by_step(folder)
    past = [path for path in known if (step_of(path) or 0) <= newest]
    kept = past[:keep] + [path for path in past if step_of(path) in pinned]
    for path in known:
        if path not in kept:
            shutil.rmtree(path.rename(folder / (WRITING + path.name)))


NEEDED = ("data", "random_device", "graphs")
COUNTS = {"captured", "replayed", "capture_seconds", "fallbacks"}  # of graphs, in a state


def checkpoint_to_resume(folder: Path, device_type: str, *, best: bool = False) -> FoundCheckpoint:
    """The newest whole checkpoint in the folder of all checkpoints of a run, or the best.

    device_type: of the run, `cpu` or `cuda`. best: that of the lowest loss; no other is taken where
    it is damaged. Raises CheckpointError.
    """
    named = best_checkpoint(folder) if best else None
    found = None if best else newest_whole_checkpoint(folder, NEEDED)
    if named is not None:
        found = FoundCheckpoint(named, *load_state(named, NEEDED), ())
    if found is None:
        raise CheckpointError(f"{folder}: there is no checkpoint to resume from")
    wrong = [
        name
        for name in ("data", "graphs", "experts")
        if not isinstance(found.state.get(name, {}), dict)
    ]
    graphs = {} if wrong else found.state["graphs"]
    kinds = {name: dict if name == "fallbacks" else int | float for name in COUNTS}
    if not all(isinstance(graphs.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError(
            f"{found.path}: damaged: its {wrong[0] if wrong else 'graphs'} are no counts and "
            "positions; go on from another checkpoint"
        )
    if found.state["random_device"] != device_type:
        raise CheckpointError(
            f"{found.path}: written on {found.state['random_device']}, this is {device_type}"
            "; a run goes on bitwise only on the same kind of device (run.device)"
        )
    return found
