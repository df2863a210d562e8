"""Runs whose folder is one of each node's own (`--run.per-node-folder`).

Ranks that do not see the folder of rank 0 write their shards on their own node, as all ranks do.
The shards then travel over the process group, in pieces of bounded size:

    save      node's  .writing-step-N/__RANK_*  ──▶  rank 0's .writing-step-N/
    load      rank 0's step-N/                  ──▶  node's .writing-step-N/, removed after the load

The invariants: a checkpoint is on the node of rank 0, with the shards of all ranks or not at all,
each with the SHA-256 of what its rank has written; other nodes keep nothing that could be taken for
a checkpoint. One rank of each node, its leader, makes and cleans the folder there.
"""

import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import from_all, on_each, on_first
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.run_files import WRITING, digest_of

TOKEN = "shared-*.tmp"  # files by which ranks find out whether they see one folder
PIECE = 16 * 2**20  # bytes
# Pieces after which all ranks meet: who sends nothing would wait longer than a collective may.
PIECES_BETWEEN = 64


@dataclass(frozen=True)
class NodeFolders:
    """Groups of ranks that see the same folder.

    Attributes:
        leaders: For each rank, the lowest rank that sees the same folder as it does.
    """

    leaders: tuple[int, ...]

    @property
    def others(self) -> list[int]:
        """Leaders of the nodes that do not see the folder of rank 0."""
        return sorted({*self.leaders} - {0})

    def leads(self, rank: int) -> bool:
        """Tells whether a rank makes and cleans the folder of a node that is not rank 0's."""
        return rank != 0 and self.leaders[rank] == rank


_Transfer = tuple[int, str, int]  # a file on its way: sender, name, bytes


def shared_folder(mesh: Mesh) -> NodeFolders:
    """All ranks see one folder."""
    return NodeFolders((0,) * mesh.world)


def gather_shards(writing: Path, mesh: Mesh, nodes: NodeFolders) -> dict[str, str]:
    """Bring the shards of ranks that are apart into rank 0's folder. Collective.

    Args:
        writing: The folder that a checkpoint is written into, on all nodes.
        mesh: All processes.
        nodes: Which of them see the same folder.

    Returns:
        Name → SHA-256 of the files that have come, as their senders have read them.

    Raises:
        OSError: On all ranks, if a file cannot be read or written.
    """
    if not nodes.others:
        return {}
    own = writing.glob(f"__{mesh.rank}_*") if nodes.leaders[mesh.rank] else ()
    sizes = on_each(mesh, lambda: {path.name: path.stat().st_size for path in own}, OSError)
    transfers = [
        (sender, name, size)
        for sender, files in enumerate(from_all(mesh, sizes))
        for name, size in sorted(files.items())
    ]
    return _carry(mesh, transfers, [0], writing, writing)


@contextmanager
def checkpoint_here(path: Path, mesh: Mesh, nodes: NodeFolders) -> Iterator[Path]:
    """Within the block every rank can read the checkpoint of rank 0. Collective.

    Yields:
        Its folder; on ranks that are apart that of a copy.

    Raises:
        CheckpointError: On all ranks, if it cannot be read or copied.
    """
    if not nodes.others:
        yield path
        return
    leads = nodes.leads(mesh.rank)
    here = path.with_name(WRITING + path.name) if nodes.leaders[mesh.rank] else path
    try:
        try:
            on_each(
                mesh, lambda: here.mkdir(parents=True, exist_ok=True) if leads else None, OSError
            )
            sizes = on_first(
                mesh, lambda: {file.name: file.stat().st_size for file in path.iterdir()}, OSError
            )
            transfers = [(0, name, size) for name, size in sorted(sizes.items())]
            digests = _carry(mesh, transfers, nodes.others, path, here)
            on_each(mesh, lambda: _check(here, digests) if leads else None, OSError)
        except OSError as error:
            raise CheckpointError(
                f"{path}: could not be copied to all nodes, which read it from there: "
                f"{error.strerror or error}"
            ) from error
        yield here
    finally:
        if leads:
            shutil.rmtree(here, ignore_errors=True)  # what stays is removed at the next start


def find_nodes(
    folder: Path, mesh: Mesh, patience: float = 2.0, *, apart: bool = True
) -> NodeFolders:
    """Find out which ranks see the same folder. Collective.

    Ranks write a file with a random name, and that name in it, and look for those of the others.

    Args:
        folder: The run's folder.
        mesh: All processes.
        patience: Seconds that a rank waits to see the file of rank 0.
        apart: Whether nodes may have folders of their own, which are made where they are missing,
            and all ranks write; otherwise rank 0 alone does.

    Raises:
        OSError: On all ranks, if one of them cannot write there.
    """
    writes = apart or mesh.rank == 0

    def write() -> str:
        if apart:
            folder.mkdir(parents=True, exist_ok=True)
        name = TOKEN.replace("*", secrets.token_hex(16)) if writes else ""
        if writes:
            (folder / name).write_text(name, encoding="utf-8")
        return name

    names = from_all(mesh, on_each(mesh, write, OSError))
    seen = [
        rank
        for rank, name in enumerate(names)
        if name and _sees(folder / name, 0.0 if rank else patience)
    ]
    leaders = tuple(from_all(mesh, min(seen, default=mesh.rank)))
    if writes and leaders[mesh.rank] == mesh.rank:
        with suppress(OSError):  # what is left is removed at the next start
            for token in folder.glob(TOKEN):
                token.unlink()
    return NodeFolders(leaders)


def _sees(path: Path, patience: float) -> bool:
    """Tells whether a file of `find_nodes` appears within `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if path.read_text(encoding="utf-8", errors="replace") == path.name:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(min(0.2, patience))
        for folder in (path.parent.parent, path.parent):
            # Opening a folder makes an NFS client ask the server about it.
            with suppress(OSError):
                os.listdir(folder)


def _carry(
    mesh: Mesh, transfers: Sequence[_Transfer], receivers: Sequence[int], source: Path, target: Path
) -> dict[str, str]:
    """Copy files from `source` on their senders to `target` on the receivers. Collective: all ranks
    know of all transfers. Returns name → SHA-256 of what was sent.

    Who cannot read or write goes through all pieces nevertheless, since the others wait for them.
    Raises OSError on all ranks then.
    """
    buffer = torch.empty(PIECE, dtype=torch.uint8)
    digests: dict[str, str] = {}
    problem, pieces = "", 0
    for sender, name, size in transfers:
        digest = hashlib.sha256()
        for start in range(0, size, PIECE):
            piece = buffer[: min(PIECE, size - start)]
            if mesh.rank == sender:
                problem = problem or _problem(_read_piece, source / name, start, piece)
                digest.update(piece.numpy().data)
                for receiver in receivers:
                    dist.send(piece, receiver, group=mesh.host_group)
            elif mesh.rank in receivers:
                dist.recv(piece, sender, group=mesh.host_group)
                problem = problem or _problem(_write_piece, target / name, start, piece)
            pieces += 1
            if pieces % PIECES_BETWEEN == 0:
                from_all(mesh, None)
        if mesh.rank == sender:
            digests[name] = digest.hexdigest()
    told = from_all(mesh, (problem, digests))
    if problems := [problem for problem, _ in told if problem]:
        raise OSError(problems[0])
    return {name: digest for _, part in told for name, digest in part.items()}


def _problem(
    action: Callable[[Path, int, torch.Tensor], None], path: Path, start: int, piece: torch.Tensor
) -> str:
    """Reads or writes a piece; returns the reason why that failed, or ""."""
    try:
        action(path, start, piece)
    except OSError as error:
        return f"{path} on {socket.gethostname()}: {error.strerror or error}"
    return ""


def _read_piece(path: Path, start: int, piece: torch.Tensor) -> None:
    with path.open("rb") as stream:
        stream.seek(start)
        if stream.readinto(piece.numpy().data) != len(piece):
            raise OSError("it has become shorter")


def _write_piece(path: Path, start: int, piece: torch.Tensor) -> None:
    with path.open("r+b" if start else "wb") as stream:
        stream.seek(start)
        stream.write(piece.numpy().data)


def _check(folder: Path, digests: Mapping[str, str]) -> None:
    """Hold received files against what was sent. Raises OSError."""
    for name, digest in digests.items():
        if digest_of(folder / name) != digest:
            raise OSError(f"{folder / name} on {socket.gethostname()} is not what was sent")
