"""Exchanges of sharded layers between the GPUs of one host by copies, without collectives.

Every rank reads what the others keep of a layer, and their sums of gradients, from their memory
(`ops/symmetric_memory.py`). Such copies are made by the copy engines of a GPU, so that products go
on with all multiprocessors, where a collective's kernels take some of them; and a rank waits for
the others only where data changes:

    parameters   | barrier |  copies, layer by layer, forward  | barrier | copies, backward | barrier | update
                 everyone has updated                          nobody reads any more

    gradients    | barrier |  copies  | barrier |  add to what is kept
                 of a layer are complete         their buffer is free

Between the first barrier of a forward and its last nobody writes parameters, nor in a backward, so
gathers need no barrier of their own. One stream beside the main one has all copies, in program
order. It forks from the main stream and is joined within the stages of one layer, so captured
graphs hold whole exchanges. A rank adds its own part and those of the ranks behind it, in their
order, each sum rounded to the dtype as by the hops of a ring; with two ranks the sums have the bits
of a collective. Beside a layer's gradients a reduction takes memory for one of their parts, for two
where there are more than two ranks.

Barriers are kernels without a time limit: a rank that is stuck, but lives, holds the others up.
"""  # noqa: E501

import contextlib
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.ops.symmetric_memory import SymmetricMemory, hosts_problem, symmetric_problem
from packgraph.parallel.ranks import gather

Exchange = dist.Work | torch.cuda.Event  # something under way, to be waited for


class Peers:
    """The ranks of a group, GPUs of one host, that read each other's memory. Making them is
    collective.

    Attributes:
        rank: Of this process in the group.
        ranks: Processes of the group.

    Raises:
        RuntimeError: Where there is no such memory, or the driver refuses it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._device = group, device
        self._memories = list[SymmetricMemory]()
        self._flags = {name: SymmetricMemory(16, group, device) for name in ("main", "beside")}
        # Its few small kernels begin before those of the main stream that wait, too.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros [size] that the others read. Collective; sizes are equal."""
        made = SymmetricMemory(size * dtype.itemsize, self._group, self._device)
        self._memories.append(made)
        return made.memory.view(dtype)

    def of_rank(self, rank: int, mine: Tensor) -> Tensor:
        """The same place of another rank's memory as `mine`, a part of what was allocated."""
        (memory,) = (memory for memory in self._memories if memory.holds(mine))
        return memory.of_rank(rank, mine)

    def barrier(self) -> None:
        """The current stream waits until those of all ranks are here."""
        is_beside = torch.cuda.current_stream(self._device) == self._stream
        self._flags["beside" if is_beside else "main"].barrier()

    @contextlib.contextmanager
    def beside(self) -> Iterator[Exchange]:
        """Within the block, work is launched on the stream of copies, behind what the current
        stream has; it may be waited for after the block."""
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield done
            done.record()


class Reduction(NamedTuple):
    """Gradients of all ranks on their way. parts: this rank's part of their sum, or two whose sum
    that is."""

    work: Exchange
    parts: tuple[Tensor, ...]


class PeerParts:
    """A bucket of a sharded layer in the memory of all ranks.

    Attributes:
        peers: The ranks.

    Args:
        peers: The ranks.
        parameters: [ranks * n], whole while the layer runs.
        kept_parameters: [n], this rank's part, in memory that peers read; None where they are not
            gathered.
        gradients: [ranks * n], this rank's sums, in such memory; empty where it is frozen.
    """

    def __init__(
        self,
        peers: Peers,
        parameters: Tensor,
        kept_parameters: Tensor | None,
        gradients: Tensor,
    ) -> None:
        self.peers = peers
        # Nearest first, so that all ranks read from different ones.
        self._others = [(peers.rank + step) % peers.ranks for step in range(1, peers.ranks)]
        self._copies = list[tuple[Tensor, Tensor]]()
        if kept_parameters is not None:
            wholes = parameters.view(peers.ranks, -1).unbind()
            self._copies = [(wholes[peers.rank], kept_parameters)] + [
                (wholes[rank], peers.of_rank(rank, kept_parameters)) for rank in self._others
            ]
        self._own, self._sums = gradients, list[Tensor]()
        if gradients.numel():
            self._own = gradients.data.view(peers.ranks, -1)[peers.rank]
            self._sums = [peers.of_rank(rank, self._own) for rank in self._others]

    def gather(self) -> Exchange:
        """Begin to make `parameters` whole."""
        with self.peers.beside() as work:
            for target, source in self._copies:
                target.copy_(source, non_blocking=True)
        return work

    def reduce(self) -> Reduction:
        """Begin to bring this rank's part of all ranks' gradients here. Collective."""
        first, *others = self._sums
        total = torch.empty_like(self._own)
        last, added = torch.empty_like(total) if others else total, self._own
        with self.peers.beside() as work:
            self.peers.barrier()
            total.copy_(first, non_blocking=True)
            for sums in others:
                total.add_(added)
                last.copy_(sums, non_blocking=True)
                added = last
            self.peers.barrier()
        return Reduction(work, (total, added))


def find_peers(group: dist.ProcessGroup | None, device: torch.device) -> Peers | None:
    """The ranks of `group` as peers; None where they are not 2 to 8 GPUs of one host, or the driver
    maps no memory of theirs, which is said. Collective."""
    if (
        group is None
        or symmetric_problem(device, dist.get_world_size(group)) is not None
        or hosts_problem(group) is not None
    ):
        return None
    made, problem = None, ""
    try:
        made = Peers(group, device)
    except RuntimeError as error:
        problem = f"rank {dist.get_rank(group)}: {error}"
    problems = gather(group, problem)
    if made is not None and not any(problems):
        made.barrier()  # builds what first ones build; no rank waits for one that has failed
        with made.beside() as done:
            made.barrier()
        done.wait()
        return made
    warnings.warn(
        "sharded layers are exchanged by collectives, which is slower: GPUs cannot read each "
        f"other's memory ({next(filter(None, problems))})",
        stacklevel=2,
    )
    return None
