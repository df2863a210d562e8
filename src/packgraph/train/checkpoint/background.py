"""Checkpoints that are written while training goes on.

    main thread   step ─ copy to the host ─ step ─ step ─ step ─ ... ─ wait ─ copy ─ step
    save thread                          └ write, checksum, rename, prune ┘        └ write ...

The main thread waits only for copies of the tensors, in host memory that is kept for the next
checkpoint and page-locked for CUDA; a thread of its own does all that `save_checkpoint` does, while
training changes the tensors and captures graphs. The invariants:

* A copy holds the bits, the shape and the place in its whole of what it is a copy of.
* A checkpoint is the one that a save at once would have written, or is not there.
* One save is under way at a time; the next one waits for it.
* The thread asks nothing of the device: a capture in another thread would fail by it. It draws no
  random numbers, and its name says so. What ranks exchange for it goes over a group of its own,
  so that it cannot come between collectives of training.
* What goes wrong is raised in the main thread: by the next save, by `wait`, or by `close`.
"""

import copy
import math
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packgraph.graphs.checks.random_state import QUIET_THREAD
from packgraph.parallel.heartbeat import Whereabouts, is_broken_connection
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import Pieces, parts_of
from packgraph.parallel.ranks import beside, from_all
from packgraph.train.checkpoint.writer import save_checkpoint
from packgraph.train.memory import available_memory
from packgraph.train.node_folders import NodeFolders
from packgraph.train.signals import Outcome

MOST = 0.5  # of the free host memory may be taken for copies
ALIGNMENT = 64  # bytes between the beginnings of copies are a multiple of it


class Staging:
    """Host memory for one checkpoint of a rank.

    Attributes:
        nbytes: Its size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take memory for copies of `tensors`, page-locked if they are on CUDA.

        Raises:
            RuntimeError: If there is not so much, or it cannot be locked.
        """
        self.nbytes = staged_bytes(tensors)
        # Not `pin_memory=True`: torch rounds pinned memory up to the next power of two.
        self._block = torch.empty(self.nbytes, dtype=torch.uint8)
        self._block.zero_()  # pages are there from now on, and not at the first copy
        self._locked = device.type == "cuda" and self.nbytes > 0
        if self._locked:
            address = self._block.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
        self._device = device

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, of the same names, shapes and dtypes as before; waits for them. The
        memory is that of the last copies."""
        staged: dict[str, Tensor] = {}
        start = 0
        for name, tensor in tensors.items():
            pieces = []
            for offsets, part in parts_of(tensor):
                copy = _within(self._block, start, part)
                copy.copy_(part, non_blocking=self._locked)
                pieces.append((offsets, copy))
                start += _padded(part)
            staged[name] = Pieces(tensor.shape, tensor.dtype, pieces)
        if self._locked:
            torch.cuda.current_stream(self._device).synchronize()
        return staged

    def close(self) -> None:
        """Unlock the memory. Copies stay good, as long as somebody has them."""
        if self._locked:
            self._locked = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr()))


def staged_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the host memory that copies of `tensors` take."""
    return sum(_padded(part) for tensor in tensors.values() for _, part in parts_of(tensor))


def _padded(part: Tensor) -> int:
    return math.ceil(part.numel() * part.element_size() / ALIGNMENT) * ALIGNMENT


def _within(block: Tensor, start: int, part: Tensor) -> Tensor:
    """A tensor like `part` whose storage is some bytes of the block: torch writes a storage as a
    whole, and would first copy what is less than that."""
    stop = start + part.numel() * part.element_size()
    own = torch.from_numpy(block.numpy()[start:stop])
    return own.view(part.dtype).view(part.shape)


class Saves:
    """All checkpoints of a run, and the one that is being written."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        mesh: Mesh,
        nodes: NodeFolders,
        whereabouts: Whereabouts,
        note: Callable[[str], None],
    ) -> None:
        """folder: of all checkpoints. keep: how many of the newest stay. whereabouts: is told the
        last whole one. note: takes a line for people."""
        self._folder, self._keep, self._nodes = folder, keep, nodes
        self._mesh = self._beside = mesh
        self._whereabouts, self._note = whereabouts, note
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._outcome = Outcome()

    @property
    def failed(self) -> bool:
        """True if the save in the background has failed and nobody was told yet."""
        return self._outcome.error is not None

    def prepare(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take host memory for copies of `tensors`, if all ranks have it; else checkpoints are
        written at once, and a note says so. Collective; to be called by the main thread."""
        needed, here = staged_bytes(tensors), socket.gethostname()
        free = available_memory(torch.device("cpu"), from_all(self._mesh, here).count(here))
        fits = free is None or needed <= MOST * free
        if not all(from_all(self._mesh, fits)):
            self._note(
                "checkpoints are written while training waits: copies for writing them beside it "
                f"take {needed / 2**30:.1f} GiB of host memory, more than half of what is free"
            )
            return
        refused = ""
        try:
            self._staging = Staging(tensors, device)
        except RuntimeError as error:  # of CUDA: the system lets a process lock so much alone
            refused = str(error)
        if reasons := [reason for reason in from_all(self._mesh, refused) if reason]:
            self._note(
                "checkpoints are written while training waits: host memory for copies cannot be "
                f"locked ({reasons[0]})"
            )
            self._free()
            return
        self._beside = beside(self._mesh)

    def _free(self) -> None:
        """Give the memory for copies back, if there is any."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def write(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best: int | None = None,
        pinned: Collection[int] = (),
        *,
        in_background: bool = False,
    ) -> None:
        """Write the checkpoint of `step` after the one that is being written, as `save_checkpoint`
        does. Collective.

        Args:
            step: Its step.
            tensors: Flat name → tensor; may change when this returns.
            state: JSON-able; may change, too.
            best: The step of the best checkpoint, which stays.
            pinned: Steps of others that stay.
            in_background: Return once the tensors were copied, if there is memory for that.

        Raises:
            CheckpointError: If it cannot be written, or the one before could not.
        """
        self.wait()
        save = partial(
            save_checkpoint,
            self._folder,
            step,
            keep=self._keep,
            best=best,
            nodes=self._nodes,
            pinned=pinned,
        )
        if not in_background or self._staging is None:
            self._whereabouts.checkpoint = str(save(tensors, state, mesh=self._mesh))
            return
        staged, described = self._staging.stage(tensors), copy.deepcopy(state)
        outcome = self._outcome

        def save_beside() -> None:
            with outcome:
                saved = save(staged, described, mesh=self._beside, staged=True)
                self._whereabouts.checkpoint = str(saved)

        # A daemon: a process that fails while another rank is gone must not wait for that rank.
        self._thread = threading.Thread(
            target=save_beside, name=f"{QUIET_THREAD}-save", daemon=True
        )
        self._thread.start()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, whether it succeeds or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Raises what it has raised, once."""
        self.settle()
        error, self._outcome = self._outcome.error, Outcome()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the checkpoint that is being written and give the memory back.

        While another error is under way, one of the save becomes a note. Nobody waits if that other
        error ends the process at once (Ctrl-C), or if it says that a rank is gone, for which the
        save may be waiting, too. Raises CheckpointError.
        """
        under_way = sys.exc_info()[1]
        if under_way is not None and (
            not isinstance(under_way, Exception) or is_broken_connection(under_way)
        ):
            return
        try:
            self.settle()
            if under_way is None:
                self.wait()
            elif self._outcome.error is not None:
                self._note(str(self._outcome.error))
        finally:
            self._free()
