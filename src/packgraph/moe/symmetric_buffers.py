"""Memory that ranks read from each other, and the exchange over it whose sizes stay on the device.

    send     |guard| to rank 0 | to rank 1 | ...      each rank reads from all others' `send` what is for it, at the
    receive  |guard| from rank 0 | from rank 1 | ...  places that they have told it, into `receive`, without gaps

`torch.ops.symm_mem.all_to_all_vdev_2d_offset` (NVSHMEM, one host) does the work: a barrier with the exchange of sizes,
then one block per chunk that reads from a peer. What holds around it, from its source (torch 2.11):

* It ends when this rank has read, not when it has been read from, and it begins with writing sizes to the peers. So
  an exchange begins with a barrier: then all ranks are done with the one before, and with whatever they did to their
  buffers since (a capture that is undone restores them).
* Its first block, when done with the first chunk, writes over the offsets that the other blocks read at their start.
  So there are never more chunks than blocks, and the first chunk is a guard: rows that mean nothing, from rank 0,
  which keep that block busy for long after the others have read.
* Memory is allocated and made known to the peers outside of captures; the first call builds what it needs.
"""
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BLOCKS = 64  # of the operation's second kernel, up to MOST_RANKS ranks: one per chunk
MOST_RANKS = 8
MOST_CHUNKS = 32  # per rank
GUARD_BYTES = 128 * 1024  # more than ten microseconds for one block


class Buffers(Protocol):
    """An exchange of rows between the ranks of a group. send, receive: [rows, width].

    guard: rows at the start of both that mean nothing. chunks: parts of what goes to one rank, the guard included.
    """

    send: Tensor
    receive: Tensor
    guard: int
    chunks: int

    def begin(self) -> None:
        """Wait (on the device) for all ranks: nothing may be written to `send` before, and `receive` is lost."""

    def swap(self, splits: Tensor) -> None:
        """Send; afterwards what came is in `receive`, by rank, without gaps. splits: as `chunked` makes them."""


def chunked(counts: Tensor, starts: Tensor, chunks: int, guard: int) -> Tensor:
    """How an exchange is cut: int64 [2, chunks * ranks], numbers and first rows of chunks, chunk by chunk.

    counts, starts: int64 [ranks], rows for each rank and where they begin in `send`. The first chunk for every rank is
    `guard` rows from the start of the buffer (0 on all ranks but the first), the others are equal parts.
    """
    step = -(-counts // (chunks - 1))
    offset = (torch.arange(chunks - 1, device=counts.device)[:, None] * step).minimum(counts)
    size = (counts - offset).minimum(step)
    first = torch.zeros_like(counts)
    return torch.stack((torch.cat((first + guard, size.flatten())), torch.cat((first, (starts + offset).flatten()))))


def symmetric_problem(device: torch.device, ranks: int) -> str | None:
    """Why symmetric buffers cannot be had, None where they can. Host facts only, equal on all ranks of a host."""
    if device.type != "cuda":
        return f"symmetric memory is memory of GPUs, not of {device.type}"
    if not 2 <= ranks <= MOST_RANKS:
        return f"the exchange over symmetric memory is for 2 to {MOST_RANKS} ranks of one host, not {ranks}"
    from torch.distributed import _symmetric_memory
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset"):
        return f"torch {torch.__version__} has no symm_mem.all_to_all_vdev_2d_offset"
    if not _symmetric_memory.is_nvshmem_available():
        return "NVSHMEM is not there (the package nvidia-nvshmem of torch's CUDA version)"
    return None


class SymmetricBuffers:
    """`Buffers` on GPUs, shared by all layers that exchange rows of one width and dtype between the same ranks.

    There is one exchange at a time: all use one stream, in the same order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, rows: int, width: int, dtype: torch.dtype, device: torch.device
                 ) -> None:
        """rows: the most that one exchange sends or receives. Collective over all processes, of other groups too, since
        memory lies at the same place on all. Raises RuntimeError where it cannot be had, or within a capture."""
        ranks = dist.get_world_size(group)
        if problem := symmetric_problem(device, ranks):
            raise RuntimeError(f"{problem}; choose the padded dispatcher")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("symmetric memory cannot be allocated while a graph is captured: make it before")
        from torch.distributed import _symmetric_memory as symmetric
        if symmetric.get_backend(device) != "NVSHMEM":
            symmetric.set_backend("NVSHMEM")
        self._group = group
        self.chunks = min(BLOCKS // ranks, MOST_CHUNKS)
        self.guard = -(-GUARD_BYTES // (width * dtype.itemsize))
        self.send, self.receive = (symmetric.empty(rows + self.guard, width, dtype=dtype, device=device)
                                   for _ in range(2))
        self._given, self._got = (symmetric.empty(2, self.chunks * ranks, dtype=torch.int64, device=device)
                                  for _ in range(2))
        self._handles = [symmetric.rendezvous(tensor, group)
                         for tensor in (self.send, self.receive, self._given, self._got)]
        self._token = torch.zeros(1, dtype=torch.int32, device=device)
        for tensor in (self.send, self.receive, self._given, self._got):
            tensor.zero_()
        self.begin()
        self.swap(torch.zeros_like(self._given))  # builds what the first call builds

    def begin(self) -> None:
        """See `Buffers`: a sum of zeros, which no rank has before all have come."""
        dist.all_reduce(self._token, group=self._group)

    def swap(self, splits: Tensor) -> None:
        """See `Buffers`. splits: int64 [2, chunks * ranks]."""
        self._given.copy_(splits)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(self.send, self.receive, self._given, self._got,
                                                     self._group.group_name)
