"""Memory of every rank that the others read: where it is, how large, and how the ranks meet.

    memory of a rank   | rows [room, width] | weights float32 [room] |     published by its owner, read by all

torch's symmetric memory (its CUDA backend: memory of one host's GPUs, mapped into every process)
gives addresses and a barrier on the device. The barrier (torch 2.11, CUDASymmetricMemory) sets a
flag in every peer's memory, waits for those of all peers and clears them again, so it can be
replayed; without a time limit it waits as long as a peer takes. Memory is allocated and made known
to the peers outside of captures; what it holds between two exchanges means nothing.
"""  # noqa: E501

import math
import os
import socket
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.ops.loss import HAS_TRITON

MOST_RANKS = 8
MULTIPLE = 8  # rows: 16 bytes of bfloat16 per column, what grouped products like
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NoSymmetricMemory(RuntimeError):
    """There is no memory that these ranks could read from each other; the message says why and what
    to do."""


class Buffers(Protocol):
    """Room for one exchange at a time, shared by all layers whose rows have this width and dtype.

    memory: uint8, this rank's. peers: int64 [ranks], where it is on each rank, as this device sees
    it. rows: that it has room for. group: name of the process group, "" = this process alone; rank:
    of this process in it.
    """

    @property
    def memory(self) -> Tensor: ...

    @property
    def peers(self) -> Tensor: ...

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def group(self) -> str: ...

    @property
    def rank(self) -> int: ...

    def grown(self, factor: float) -> "Buffers":
        """Others, with room for `factor` times a balanced load. Collective."""


def rows_for(pairs: int, factor: float, ranks: int) -> int:
    """R, the rows of a rank's experts where every rank routes T * k = `pairs` pairs: `factor` times
    the balanced load, and no more than can come."""
    return -(-min(math.ceil(pairs * factor), pairs * ranks) // MULTIPLE) * MULTIPLE


def weights_start(rows: int, width: int, dtype: torch.dtype) -> int:
    """The byte at which the weights begin."""
    return -(-rows * width * dtype.itemsize // 16) * 16


def bytes_for(rows: int, width: int, dtype: torch.dtype) -> int:
    """Of the memory of one rank: its tokens have no more weights than there are rows."""
    return weights_start(rows, width, dtype) + 4 * rows


def meet(memory: Tensor, group: str) -> None:
    """Wait on the device until all ranks are here, with everything that they launched before. Can
    be captured.

    memory: of these ranks, known to all since it was allocated, so that nothing is asked of the
    host.
    """
    from torch.distributed import _symmetric_memory as symmetric

    symmetric.rendezvous(memory, group).barrier()  # type: ignore[arg-type]


def symmetric_problem(device: torch.device, ranks: int) -> str | None:
    """Why symmetric buffers cannot be had, None where they can. Host facts only, equal on all ranks
    of a host."""
    if device.type != "cuda":
        return f"symmetric memory is memory of GPUs, not of {device.type}"
    if not 2 <= ranks <= MOST_RANKS:
        return f"symmetric memory is for 2 to {MOST_RANKS} ranks of one host, not {ranks}"
    if not HAS_TRITON:
        return "the kernels that read it need Triton, which is not installed"
    return None


@dataclass(frozen=True, eq=False)
class SymmetricBuffers:
    """`Buffers` on GPUs of one host. There is one exchange at a time: all use one stream, in one
    order on every rank.

    members: the ranks. pairs: T * k of the largest bucket. factor: room over a balanced load of it.
    """

    members: dist.ProcessGroup
    pairs: int
    factor: float
    width: int
    dtype: torch.dtype
    device: torch.device
    memory: Tensor = field(init=False)
    peers: Tensor = field(init=False)
    rows: int = field(init=False)
    group: str = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        """Collective over the ranks. Raises NoSymmetricMemory where it cannot be had, RuntimeError
        in a capture."""
        ranks = dist.get_world_size(self.members)
        problem = symmetric_problem(self.device, ranks)
        if problem is None and self.dtype not in DTYPES:
            problem = f"rows travel in bfloat16, float16 or float32, not {self.dtype}"
        if problem is None:
            problem = _hosts_problem(self.members)
        if problem is not None:
            raise NoSymmetricMemory(f"{problem}; use dispatcher = padded")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "symmetric memory cannot be allocated while a graph is captured: make it before"
            )
        rows, group = rows_for(self.pairs, self.factor, ranks), str(self.members.group_name)
        memory, peers = _allocate(bytes_for(rows, self.width, self.dtype), group, self.device)
        for name, value in (
            ("memory", memory),
            ("peers", peers),
            ("rows", rows),
            ("group", group),
            ("rank", dist.get_rank(self.members)),
        ):
            object.__setattr__(self, name, value)

    def grown(self, factor: float) -> "SymmetricBuffers":
        """See `Buffers`. Graphs that use the old ones must be captured anew."""
        return SymmetricBuffers(
            self.members, self.pairs, factor, self.width, self.dtype, self.device
        )


def _hosts_problem(members: dist.ProcessGroup) -> str | None:
    names: list[str] = [""] * dist.get_world_size(members)
    dist.all_gather_object(names, socket.gethostname(), group=members)
    if len(set(names)) == 1:
        return None
    return (
        "symmetric memory is for ranks of one host, but these are on "
        f"{', '.join(sorted(set(names)))}"
    )


def _allocate(size: int, group: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's memory and where it is on all ranks: uint8 [size] and int64 [ranks]."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory as symmetric

    # As for NCCL (parallel/processes.py): multicast memory is not freed when graphs that used it
    # are.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if symmetric.get_backend(device) != "CUDA":
        symmetric.set_backend("CUDA")
    # Not from a pool: there a tensor may begin at another offset on every rank.
    memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    handle = symmetric.rendezvous(memory, group)  # type: ignore[arg-type]
    if handle.buffer_ptrs[handle.rank] != memory.data_ptr():
        raise NoSymmetricMemory(
            f"torch {torch.__version__} says that its symmetric memory begins elsewhere than the "
            "tensor in it; use dispatcher = padded"
        )
    memory.zero_()
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    handle.barrier()  # builds what the first one builds
    return memory, peers
