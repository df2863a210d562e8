"""Memory of every rank that the others read: where it is, how large, and how the ranks meet.

    memory of a rank   | rows [room, width] | weights float32 [room] |     published by its owner, read by all

It is symmetric memory (`ops/symmetric_memory.py`). What it holds between two exchanges means
nothing.
"""  # noqa: E501

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.ops import symmetric_memory
from packgraph.ops.symmetric_memory import NoSymmetricMemory, SymmetricMemory, hosts_problem
from packgraph.ops.triton_found import HAS_TRITON

MULTIPLE = 8  # rows: 16 bytes of bfloat16 per column, what grouped products like
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    """Bytes of the memory of one rank: its tokens have no more weights than there are rows."""
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
    """Returns the reason why symmetric buffers cannot be had, None where they can. Host facts only,
    equal on all ranks of a host."""
    problem = symmetric_memory.symmetric_problem(device, ranks)
    if problem is None and not HAS_TRITON:
        return "the kernels that read it need Triton, which is not installed"
    return problem


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
    symmetric: SymmetricMemory = field(init=False)

    def __post_init__(self) -> None:
        """Collective over the ranks. Raises NoSymmetricMemory where it cannot be had, RuntimeError
        in a capture."""
        ranks = dist.get_world_size(self.members)
        problem = symmetric_problem(self.device, ranks)
        if problem is None and self.dtype not in DTYPES:
            problem = f"rows travel in bfloat16, float16 or float32, not {self.dtype}"
        if problem is None:
            problem = hosts_problem(self.members)
        if problem is not None:
            raise NoSymmetricMemory(f"{problem}; use dispatcher = padded")
        rows = rows_for(self.pairs, self.factor, ranks)
        size = bytes_for(rows, self.width, self.dtype)
        try:
            made = SymmetricMemory(size, self.members, self.device)
        except NoSymmetricMemory as error:
            raise NoSymmetricMemory(f"{error}; use dispatcher = padded") from error
        made.barrier()  # builds what the first one builds
        for name, value in (
            ("symmetric", made),
            ("memory", made.memory),
            ("peers", torch.tensor(made.addresses, dtype=torch.int64, device=self.device)),
            ("rows", rows),
            ("group", str(self.members.group_name)),
            ("rank", dist.get_rank(self.members)),
        ):
            object.__setattr__(self, name, value)

    def grown(self, factor: float) -> "SymmetricBuffers":
        """See `Buffers`. Graphs that use the old ones must be captured anew."""
        return SymmetricBuffers(
            self.members, self.pairs, factor, self.width, self.dtype, self.device
        )
