"""Point-to-point links between the ranks of one pipeline: one process group per directed edge.

A communicator serves its transfers one after another, in the order in which they were started. If a
rank's receive from one neighbour and its send to the other shared one, the send would wait for data
it has nothing to do with. So every edge has a communicator of its own, on which one side only sends
and the other only receives, in the order of the plan:

    forward    0 -> 1   1 -> 2   2 -> 3   3 -> 0 (next chunk)
    backward   0 <- 1   1 <- 2   2 <- 3   3 <- 0 (chunk before)

`tie_groups` are the groups of ranks that share a parameter: a tied embedding is the first stage's
table and the last one's head.

    first stage   embed_tokens   gradient of the rows it looked up ──┐
                                                                     ├─▶ one sum, the same bits on
                                                                     both ─▶ one update
    last stage    embed_tokens   gradient of the head ───────────────┘

What has the same name on several ranks of a pipeline is one parameter. The invariant: copies start
equal (fresh and loaded values go by name), get equal gradients and are updated alike, so they stay
equal in every bit.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import from_all

STEPS = {"forward": 1, "backward": -1}


class _NothingSent:
    """A transfer of a dry run."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def is_completed(self) -> bool:
        return True


Transfer = dist.Work | _NothingSent  # a transfer under way


class Links:
    """The links of the pipeline that this process belongs to.

    ranks: the global ranks of this pipeline, in stage order. control: their group on the host, None
    = this process alone.
    """

    def __init__(
        self, ranks: Sequence[int], groups: dict[str, Any], everyone: Any, control: Any
    ) -> None:
        """groups: process groups by edge name. everyone: all ranks, on the device."""
        self.ranks, self._groups, self._everyone = list(ranks), groups, everyone
        self.control: dist.ProcessGroup | None = control
        self.rank = self.ranks.index(dist.get_rank()) if len(self.ranks) > 1 else 0
        self._is_silent = False

    @property
    def size(self) -> int:
        """Ranks in the pipeline."""
        return len(self.ranks)

    @property
    def connects_all(self) -> bool:
        """True if there are no other ranks."""
        return self.size == (dist.get_world_size() if dist.is_initialized() else 1)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Within the block nothing is sent, and what is received is zero: a dry run, in which
        other ranks may have failed."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def send(self, tensor: torch.Tensor, stage: int, direction: str) -> Transfer:
        """Start sending what virtual stage `stage` made: activations `forward`, gradients
        `backward`."""
        if self._is_silent:
            return _NothingSent()
        to = self.ranks[(stage + STEPS[direction]) % self.size]
        return dist.isend(tensor, to, group=self.group(stage, direction))  # type: ignore[return-value]

    def receive(self, tensor: torch.Tensor, stage: int, direction: str) -> Transfer:
        """Start receiving into `tensor` what virtual stage `stage` needs."""
        if self._is_silent:
            tensor.zero_()
            return _NothingSent()
        source = stage - STEPS[direction]
        group = self.group(source, direction)
        return dist.irecv(tensor, self.ranks[source % self.size], group=group)  # type: ignore[return-value]

    def group(self, stage: int, direction: str) -> Any:
        """The process group of the edge over which virtual stage `stage` sends in `direction`; None
        when this process is at neither end."""
        return self._groups.get(f"{direction} from {stage % self.size}")

    def warm_up(self, token: torch.Tensor) -> None:
        """Send `token` once over every edge, one after another; collective.

        NCCL makes the communicator of a pair at its first transfer and holds the host until both
        sides are there. Left to the first step, this would hold ranks in the middle of it.
        """
        for direction, step in STEPS.items():
            for stage in range(self.size):
                partner = (stage + step) % self.size
                if stage == self.rank:
                    dist.send(token, self.ranks[partner], group=self.group(stage, direction))
                elif partner == self.rank:
                    dist.recv(token, self.ranks[stage], group=self.group(stage, direction))

    def sum(self, tensor: torch.Tensor) -> None:
        """Add `tensor` up over the ranks of the pipeline, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._everyone)


def make_links(mesh: Mesh) -> Links:
    """The links of this process's pipeline. Collective: every process of the mesh calls it."""
    if mesh.size("pp") == 1:
        return Links([mesh.rank], {}, None, None)
    mine, size = None, mesh.size("pp")
    for ranks in pipelines(mesh):
        groups = {
            f"{direction} from {place}": dist.new_group(
                sorted((rank, ranks[(place + step) % size]))
            )
            for direction, step in STEPS.items()
            for place, rank in enumerate(ranks)
        }
        everyone, control = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        if mesh.rank in ranks:
            mine = Links(ranks, groups, everyone, control)
    assert mine is not None and mesh.devices is not None
    mine.warm_up(torch.zeros(1, device=mesh.devices.device_type))
    return mine


def pipelines(mesh: Mesh) -> list[list[int]]:
    """The global ranks of every pipeline of the mesh, each in stage order: those that differ in
    `pp` only."""
    return mesh.layout.grouped(lambda place: tuple((place | {"pp": 0}).values()))


def shared_names(
    names: Sequence[Sequence[str]], pipeline: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """name -> the ranks of `pipeline` (global, in stage order) that hold it, where there is more
    than one.

    names: by rank, of all ranks. In order of the names, so every process gets the same.
    """
    holders = {
        name: tuple(rank for rank in pipeline if name in set(names[rank]))
        for name in sorted({name for rank in pipeline for name in names[rank]})
    }
    return {name: ranks for name, ranks in holders.items() if len(ranks) > 1}


def tie_groups(mesh: Mesh, names: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """The parameters of this rank that other stages hold too, each with the group of the ranks that
    hold it.

    names: of this rank's parameters. Collective: every process of the mesh calls it. The first
    stage that holds a parameter is rank 0 of its group.
    """
    if mesh.size("pp") == 1:
        return {}
    everyones = from_all(mesh, list(names))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine: dict[str, dist.ProcessGroup] = {}
    for pipeline in pipelines(mesh):
        for name, ranks in shared_names(everyones, pipeline).items():
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if mesh.rank in ranks:
                mine[name] = groups[ranks]
    return mine
