"""The folder of a run: which one it is, what it says of its configuration, and that no finished
work is overwritten.

    runs/NAME/  config.json  metrics.jsonl  run.log  tensorboard/  checkpoints/  summary.json

A name given by the user that exists already is refused without `--resume`. A name derived from the
model (its preset, or the folder of a model of transformers) is made unique: qwen3-tiny,
qwen3-tiny-2, qwen3-tiny-3 …; `--resume` without a name takes the last of them. A run that ended
before its first checkpoint has nothing to lose: its name is free again. A run that is being written
is claimed by a lock that its process holds, so two processes never write the same one.

When a run begins in its folder (`begin_in`), all ranks must see one file system there, and what a
killed process left is gone. Every rank writes its shards into the folder, and rank 0 declares the
checkpoint whole. Where the folder is one of each node's own, no checkpoint would ever be; so the
run is refused before it computes anything, or gathers them (`node_folders.py`) if it was told so.

config.json is written at every start, with a checksum, and every checkpoint holds the configuration
that it was saved under. A config.json that is empty, damaged or edited does not decide what a
resumed run trains: the newest checkpoint that says so does. (A damaged file and an edited one look
alike; values are changed by options.)
"""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import from_all, on_each, on_first
from packgraph.train.checkpoint.writer import remove_leftovers
from packgraph.train.config.hub import repository_of
from packgraph.train.config.reading import (
    ConfigError,
    differences,
    read_config,
    to_dict,
    true_of,
)
from packgraph.train.config.sections import TrainConfig
from packgraph.train.config.stored import stored_config
from packgraph.train.metrics import BOARD, NAMES
from packgraph.train.node_folders import NodeFolders, find_nodes, shared_folder
from packgraph.train.progress import RUN_LOG
from packgraph.train.run_files import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    SUMMARY,
    RunFileError,
    sync_folder,
    writing,
)

PATIENCE = 60.0  # seconds: a job that is started again may come before its predecessor has ended
CLAIM = ".claim"  # locked by the process that writes the run
FILES = (
    *(CONFIG, METRICS, SUMMARY, RUN_LOG, CLAIM, CHECKPOINTS, BOARD, NAMES),
    *("wandb", "offload", "profile"),
)
# What may differ when a run goes on: how long it runs, what is written and where, not what it
# learns. Graphs compute what eager training computes, data are compared by their contents, and
# checkpoints know no layout.
FREE_ON_RESUME = (
    "run.name",
    "run.folder",
    "run.resume",
    "run.steps",
    "run.log_every",
    "run.profile",
    "run.checkpoint_every",
    "run.max_minutes",
    "run.timeout",
    "run.per_node_folder",
    "run.keep_checkpoints",
    "run.async_checkpoints",
    "run.tracker",
    "run.device",
    "run.recompute",
    "graph.enabled",
    "graph.backend",
    "graph.warmup",
    "graph.slots",
    "graph.memory_budget",
    "graph.strict",
    "graph.scope",
    "graph.granularity",
    "graph.optimizer",
    "graph.autotune",
    "optimizer.offload",
    "optimizer.resident",
    "data.path",
    "data.mixture",
    "data.prefetch",
    "data.workers",
    "data.worker_timeout",
    "data.tokenizer",
    "eval.every",
    "eval.path",
    "eval.tokens",
    "eval.patience",
    "offload.modules",
    "offload.budget",
    "offload.lost",
    "offload.fraction",
    "offload.min_bytes",
    "offload.margin",
    "offload.delta_bytes_per_pp_rank",
    "offload.in_flight",
    "offload.delay_until_replay",
    "parallel.time_rows",
    "run.init_from",
    "hf.path",
    "parallel.ep",
    "parallel.chunks",
    "parallel.sequence",
    "parallel.expert_stash",
    "parallel.expert_stash_host",
    "parallel.expert_stash_page_rows",
    "parallel.expert_stash_resident",
    "parallel.shard",
    "parallel.shard_ranks",
)
DECAY = "optimizer.decay_steps"
# What may be changed on the way by saying so: a loss that is no number asks for it, or a document
# that is bad.
CHANGED_WHEN_ASKED = (
    "optimizer.learning_rate",
    "optimizer.clip_norm",
    "optimizer.gradients",
    "optimizer.min_learning_rate_fraction",
    "data.on_bad",
    "run.on_spike",
    DECAY,
)
# NFS clients remember for up to 30 s that a folder was not there (acdirmin); only a failing start
# waits so long.
PATIENCE_SECONDS = 35.0


class TakenError(ConfigError):
    """A run's folder that another process was quicker to take."""


def choose_folder(config: TrainConfig) -> Path:
    """The folder this run is to be written to; creates nothing. Raises ConfigError if it is taken
    or missing."""
    parent, name = Path(config.run.folder), config.run.name
    if parent.exists() and not parent.is_dir():
        raise ConfigError(
            [f"run.folder = {parent}: this is a file; name the folder that is to hold all runs"]
        )
    if config.run.resume or name is not None:
        folder, resumes, busy = _newest(config), config.run.resume, "is being written by another"
        what = f"{folder}" if name is not None else f"of {model_name(config)} in {parent}"
        goes_on = has_checkpoint(folder)
        more = ", or go on with it by --resume" if goes_on else " or remove that folder"
        problems = {
            f"--resume: there is no run {what}": resumes and not folder.is_dir(),
            f"--resume: {folder} {busy} process; stop that one first": resumes
            and is_running(folder),
            f"{folder} {busy} process; choose another --run.name": not resumes
            and is_running(folder),
            f"{folder} exists already; choose another --run.name{more}": not resumes
            and folder.exists()
            and not _was_given_up(folder),
        }
        if found := true_of(problems):
            raise ConfigError(found[:1])
        return folder
    model = model_name(config)
    taken = _numbered(parent, model)
    number = max(taken, default=0)
    if not number or not _was_given_up(taken[number]):
        number += 1
    return parent / (model if number == 1 else f"{model}-{number}")


def can_go_on(config: TrainConfig) -> bool:
    """Tells whether there is a checkpoint that a run under `--resume auto` goes on from.

    Waits for a process that is still writing the run, for the time that a process which was told to
    stop may take.
    """
    folder = _newest(config)
    end = time.monotonic() + PATIENCE
    while is_running(folder) and time.monotonic() < end:
        time.sleep(0.2)
    return has_checkpoint(folder)


def _newest(config: TrainConfig) -> Path:
    """The folder of the run of this name, or of the last one that is called like the model."""
    parent, name = Path(config.run.folder), config.run.name
    if name is not None:
        return parent / name
    # Runs of models of transformers were called like their preset, hf.
    taken = _numbered(parent, model_name(config)) or _numbered(parent, config.preset)
    return taken[max(taken)] if taken else parent / model_name(config)


def has_checkpoint(folder: Path) -> bool:
    """Tells whether the run's folder has anything to go on from."""
    return any((folder / CHECKPOINTS).glob("step-*"))


def _was_given_up(folder: Path) -> bool:
    """Tells whether a folder holds nothing but the files of a run that ended before its first
    checkpoint."""
    return folder.is_dir() and not is_running(folder) and _is_free(folder)


def _is_free(folder: Path) -> bool:
    """Tells whether a run's folder holds nothing that another run would destroy."""
    return not has_checkpoint(folder) and all(
        path.name in FILES or path.suffix == ".tmp" for path in folder.iterdir()
    )


def take_folder(folder: Path, config: TrainConfig, held: ExitStack) -> Path:
    """Claim `folder`, which `choose_folder` has chosen, for as long as `held` is open. Returns what
    was claimed.

    Between choosing and claiming lie reading of data and meeting of processes, and another run may
    have been made there meanwhile: so it is looked at again under the claim. A run without a name
    takes the next free number then. Raises ConfigError and RunFileError.
    """
    while True:
        try:
            with ExitStack() as attempt:
                attempt.enter_context(claimed(folder))
                if not config.run.resume and not _is_free(folder):
                    raise TakenError(
                        [
                            f"{folder} was made by another process meanwhile; choose another "
                            "--run.name"
                        ]
                    )
                held.enter_context(attempt.pop_all())
                return folder
        except ConfigError:
            if config.run.name is not None or config.run.resume:
                raise
        folder = choose_folder(config)


def is_running(folder: Path) -> bool:
    """Tells whether a process holds `folder` by `claimed`."""
    if not (folder / CLAIM).is_file():  # a pipe would be waited for
        return False
    try:
        with (folder / CLAIM).open("rb") as stream:
            # Shared: several processes of one launch may ask at the same time.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Within the block no other process writes the run in `folder`, which is made when missing;
    ends with the process.

    Raises RunFileError when it cannot be made, TakenError when another process was quicker.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # others may own the folder of all runs
            sync_folder(folder.parent)
        if (folder / CLAIM).exists() and not (folder / CLAIM).is_file():
            raise ConfigError(
                [f"{folder / CLAIM}: this is no file, and a run is claimed by it; remove it"]
            )
        stream = (folder / CLAIM).open("ab")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TakenError(
                [
                    f"{folder} is being written by another process; choose another --run.name, or "
                    "start again when that one has ended"
                ]
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
        yield


def model_name(config: TrainConfig) -> str:
    """The name of what is trained: that of the preset, or of a model of transformers that of its
    folder, or of its repository in the cache of Hugging Face's hub."""
    if config.hf.path is None:
        return config.preset
    if (found := repository_of(config.hf.path)) is not None:
        return found[0].rpartition("/")[2]
    return Path(os.path.abspath(Path(config.hf.path).expanduser())).name or config.preset


def _numbered(parent: Path, name: str) -> dict[int, Path]:
    """Existing folders NAME and NAME-N by number (NAME is 1)."""
    found: dict[int, Path] = {}
    for path in parent.iterdir() if parent.is_dir() else ():
        if (match := re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name)) is not None:
            found[int(match[1] or 1)] = path
    return found


def check_same_run(folder: Path, config: TrainConfig, asked: Collection[str] = ()) -> list[str]:
    """Raise ConfigError listing all values that must not change when the run in `folder` goes on.

    asked: dotted names of the values given as options; some may change when asked for so. Returns a
    line for each value that makes the rest of the run another one than it would have been.
    """
    path = folder / CONFIG
    layer, told = stored_config(folder)
    # What the file does not say (it may be older than an option) is as it is now.
    stored = read_config(config, [layer])
    changed = differences(to_dict(stored), to_dict(config))
    # The step at which the decay of the learning rate ends counts, not how it was said.
    before, after = (run.optimizer.decay_steps or run.run.steps for run in (stored, config))
    changed.pop(DECAY, None)
    if before != after:
        changed[DECAY] = (before, after)
    free = {*FREE_ON_RESUME, *(name for name in CHANGED_WHEN_ASKED if name in asked)}
    free |= {f"parallel.{axis.name}" for axis in config.parallel.layout().axes}
    free.add("parallel.cp_kind")  # of a layout, too, but ranks of one run must have the same
    if config.optimizer.decay_steps is None and stored.optimizer.decay_steps is None:
        free.add(DECAY)
    problems = [
        f"{key}: the run has {old!r}, now it is {new!r}"
        + (
            f"; to change it from here on, say --{key.replace('_', '-')} {new}"
            if key in CHANGED_WHEN_ASKED
            else ""
        )
        for key, (old, new) in changed.items()
        if key not in free
    ]
    if problems:
        raise ConfigError(
            [*problems, f"a resumed run must be the same; take its values by --config {path}"]
        )
    notes = [told] if told else []
    notes += [
        f"{key} changes from {changed[key][0]} to {changed[key][1]}: from here on this is another "
        "run"
        for key in CHANGED_WHEN_ASKED
        if key in changed and key in asked
    ]
    if DECAY in changed and DECAY not in asked:
        notes.append(
            "run.steps changes and optimizer.decay_steps is none, so the learning rate now falls "
            "until step "
            f"{after} instead of {before}; --optimizer.decay-steps {before} keeps it as it was"
        )
    return notes


def begin_in(
    folder: Path, mesh: Mesh, per_node: bool = False, held: ExitStack | None = None
) -> NodeFolders:
    """Check the claimed folder of a run and clean it up, before anything is written. Collective.

    Args:
        folder: The run's folder, claimed by rank 0.
        mesh: All processes.
        per_node: Whether nodes may have a folder of their own there.
        held: Where the folders of other nodes stay claimed, until it is closed.

    Returns:
        Which ranks see the same folder.

    Raises:
        RunFileError: On all ranks, if some do not see what rank 0 writes, or it cannot be written.
        ConfigError: On all ranks, if another node holds a run of this name.
    """
    on_first(
        mesh, lambda: _clean(folder / CHECKPOINTS), RunFileError
    )  # first, since a full disk has room then
    if not per_node or mesh.world == 1:
        check_shared(folder, mesh)
        return shared_folder(mesh)
    with writing(folder):
        nodes = find_nodes(folder, mesh)
    leads = nodes.leads(mesh.rank)
    on_each(
        mesh,
        lambda: _take_on_node(folder, mesh.rank, held or ExitStack()) if leads else None,
        RunFileError,
        ConfigError,
    )
    return nodes


def _take_on_node(folder: Path, rank: int, held: ExitStack) -> None:
    """Claim and clean the folder of a node that is not rank 0's."""
    held.enter_context(claimed(folder))
    if not _is_free(folder):
        where = f"{folder.absolute()} on {socket.gethostname()} (rank {rank})"
        raise ConfigError(
            [
                f"{where} holds another run, or checkpoints of this one, of when rank 0 was there. "
                "Under run.per_node_folder checkpoints are on the node of rank 0: start the ranks "
                "in the order of before, or choose another --run.name"
            ]
        )
    _clean(folder / CHECKPOINTS)


def check_shared(folder: Path, mesh: Mesh, patience: float | None = None) -> None:
    """Agree that `folder`, which rank 0 has made, is on one file system that all ranks of `mesh`
    see.

    Collective.

    Args:
        folder: The run's folder, claimed by rank 0.
        mesh: All processes.
        patience: Seconds that a rank waits for the file to appear.

    Raises:
        RunFileError: On all ranks, naming those that do not see the file.
    """
    with writing(folder):
        waits = PATIENCE_SECONDS if patience is None else patience
        blind = find_nodes(folder, mesh, waits, apart=False).others
    hosts = from_all(mesh, socket.gethostname())
    if blind:
        ranks = ("rank " if len(blind) == 1 else "ranks ") + ", ".join(map(str, blind))
        raise RunFileError(
            f"{folder.absolute()}: {ranks} (on {', '.join(sorted({hosts[n] for n in blind}))}) do "
            "not see what rank 0 writes there, so checkpoints would lack their shards. All "
            "processes must write to one shared file system: give a path on it that is the same on "
            "all nodes as --run.folder; or say --run.per-node-folder, and checkpoints are gathered "
            "on the node of rank 0"
        )


def _clean(checkpoints: Path) -> None:
    with writing(
        checkpoints,
        "Remove `.writing-*` and `.replaced-*` there by hand, or choose another --run.name",
    ):
        remove_leftovers(checkpoints)
