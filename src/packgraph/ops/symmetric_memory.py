"""Memory of a GPU that the other ranks of a host read, and a barrier on the device.

torch's symmetric memory (its CUDA backend: memory of one host's GPUs, mapped into every process)
gives addresses and a barrier on the device. The barrier (torch 2.11, CUDASymmetricMemory) sets a
flag in every peer's memory, waits for those of all peers and clears them again, so it can be
replayed; without a time limit it waits as long as a peer takes. Memory is allocated and made known
to the peers outside of captures.
"""

import os
import socket
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

MOST_RANKS = 8
_allocated = weakref.WeakSet["SymmetricMemory"]()


class NoSymmetricMemory(RuntimeError):
    """Error of ranks that have no memory to read from each other; the message says why."""


def symmetric_problem(device: torch.device, ranks: int) -> str | None:
    """Returns the reason why these ranks cannot have symmetric memory, None where they can. Facts
    that all ranks of a host share."""
    if device.type != "cuda":
        return f"symmetric memory is memory of GPUs, not of {device.type}"
    if not 2 <= ranks <= MOST_RANKS:
        return f"symmetric memory is for 2 to {MOST_RANKS} ranks of one host, not {ranks}"
    return None


def symmetric_bytes() -> int:
    """Bytes of this process's GPU in symmetric memory, which torch's allocator does not count."""
    return sum(made.memory.numel() for made in _allocated)


def most_symmetric_bytes() -> int:
    """The most that `symmetric_bytes` has been in this process."""
    return SymmetricMemory.most_bytes


def hosts_problem(members: dist.ProcessGroup) -> str | None:
    """Returns the reason why the ranks of a group cannot have it if they are on several hosts, else
    None. Collective."""
    names: list[str] = [""] * dist.get_world_size(members)
    dist.all_gather_object(names, socket.gethostname(), group=members)
    if len(set(names)) == 1:
        return None
    return (
        "symmetric memory is for ranks of one host, but these are on "
        f"{', '.join(sorted(set(names)))}"
    )


class SymmetricMemory:
    """Zeros of this rank, which the others of a group read. Making one is collective. The first
    barrier must not be in a capture, nor may the memory be dropped in one: torch 2.11 ends the
    process then.

    Args:
        size: Bytes, equal on all ranks.
        members: The ranks, all of one host.
        device: Of this rank.

    Attributes:
        memory: uint8 [size].
        addresses: Where it begins on each rank, as this device sees it.

    Raises:
        NoSymmetricMemory: Where it cannot be had.
        RuntimeError: In a capture.
    """

    most_bytes: ClassVar[int] = 0  # of all together

    def __init__(self, size: int, members: dist.ProcessGroup, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "symmetric memory cannot be allocated while a graph is captured: make it before"
            )
        # As for NCCL (parallel/ranks.py): multicast memory is not freed when graphs that used
        # it are.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if symmetric.get_backend(device) != "CUDA":
            symmetric.set_backend("CUDA")
        torch.cuda.empty_cache()  # the driver does not know what torch could give back
        # Not from a pool: there a tensor may begin at another offset on every rank.
        self.memory: Tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._handle: Any = symmetric.rendezvous(self.memory, members.group_name)
        self.addresses: list[int] = list(self._handle.buffer_ptrs)
        if self.addresses[self._handle.rank] != self.memory.data_ptr():
            raise NoSymmetricMemory(
                f"torch {torch.__version__} says that its symmetric memory begins elsewhere than "
                "the tensor in it"
            )
        self.memory.zero_()
        _allocated.add(self)
        SymmetricMemory.most_bytes = max(SymmetricMemory.most_bytes, symmetric_bytes())
        torch.cuda.synchronize(device)

    def barrier(self) -> None:
        """The current stream waits until those of all ranks are here, with everything that was
        launched on them before. Can be captured."""
        self._handle.barrier()

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies in this rank's memory."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return 0 <= offset <= self.memory.numel() - tensor.numel() * tensor.element_size()

    def of_rank(self, rank: int, mine: Tensor) -> Tensor:
        """The same place of another rank's memory as `mine`, a contiguous part of this rank's."""
        offset = mine.data_ptr() - self.memory.data_ptr()
        found: Tensor = self._handle.get_buffer(
            rank, mine.shape, mine.dtype, storage_offset=offset // mine.element_size()
        )
        return found
