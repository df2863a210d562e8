"""The start of a run in its folder: all ranks see one file system there, and what a killed process
left is gone.

Every rank writes its shards into the run's folder, and rank 0 declares the checkpoint whole. Where
the folder is one of each node's own, no checkpoint would ever be; so the run is refused before it
computes anything.
"""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.processes import from_all, on_first
from packgraph.train.checkpoint import remove_leftovers
from packgraph.train.run_files import RunFileError, sync_folder, writing
from packgraph.train.stored_config import CHECKPOINTS

# NFS clients remember for up to 30 s that a folder was not there (acdirmin); only a failing start
# waits so long.
PATIENCE_SECONDS = 35.0
TOKEN = "shared-*.tmp"


def begin_in(folder: Path, mesh: Mesh) -> None:
    """Check the claimed folder of a run and clean it up, before anything is written. Collective.

    Raises:
        RunFileError: On all ranks, if some do not see what rank 0 writes, or it cannot be written.
    """
    on_first(
        mesh, lambda: _clean(folder / CHECKPOINTS), RunFileError
    )  # first, since a full disk has room then
    check_shared(folder, mesh)


def check_shared(folder: Path, mesh: Mesh, patience: float | None = None) -> None:
    """Agree that `folder`, which rank 0 has made, is on one file system that all ranks of `mesh`
    see.

    Rank 0 writes a file with a random name and content, and all others look for it. Collective.

    Args:
        folder: The run's folder, claimed by rank 0.
        mesh: All processes.
        patience: Seconds that a rank waits for the file to appear.

    Raises:
        RunFileError: On all ranks, naming those that do not see the file.
    """
    name, token = on_first(mesh, lambda: _write_token(folder), RunFileError)
    seen = _sees(folder / name, token, PATIENCE_SECONDS if patience is None else patience)
    blind = {
        rank: host
        for rank, (host, sees) in enumerate(from_all(mesh, (socket.gethostname(), seen)))
        if not sees
    }
    if mesh.rank == 0:
        with suppress(OSError):  # what is left is removed at the next start
            (folder / name).unlink()
    if blind:
        ranks = ("rank " if len(blind) == 1 else "ranks ") + ", ".join(map(str, blind))
        raise RunFileError(
            f"{folder.absolute()}: {ranks} (on {', '.join(sorted(set(blind.values())))}) do not "
            "see what rank 0 writes "
            "there, so checkpoints would lack their shards. All processes must write to one shared "
            "file system: give a "
            "path on it that is the same on all nodes as --run.folder"
        )


def _write_token(folder: Path) -> tuple[str, str]:
    token = secrets.token_hex(16)
    name = TOKEN.replace("*", token[:8])
    with writing(folder):
        for leftover in folder.glob(TOKEN):
            leftover.unlink()
        (folder / name).write_text(token, encoding="utf-8")
    with suppress(OSError):  # the run's folder is new there; others may own the folder of all runs
        sync_folder(folder.parent)
    return name, token


def _sees(path: Path, token: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if path.read_text(encoding="utf-8", errors="replace") == token:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(min(0.2, patience))
        for folder in (path.parent.parent, path.parent):
            # Opening a folder makes an NFS client ask the server about it.
            with suppress(OSError):
                os.listdir(folder)


def _clean(checkpoints: Path) -> None:
    with writing(
        checkpoints,
        "Remove `.writing-*` and `.replaced-*` there by hand, or choose another --run.name",
    ):
        remove_leftovers(checkpoints)
