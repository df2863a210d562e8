"""Point-to-point links between the ranks of one pipeline: one process group per direction and per wrap edge.

A communicator carries messages in the order they were posted. Activations and gradients cross in opposite orders, and
with several chunks a rank sends to a neighbour both along the row and around its end; on one communicator these could
be posted in incompatible orders by the two sides. So each kind of edge has its own:

    forward        rank 0 -> 1 -> 2 -> 3          backward        0 <- 1 <- 2 <- 3
    forward wrap   rank 3 -> 0 (next chunk)       backward wrap   0 -> 3 (chunk before)
"""
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from packgraph.parallel.mesh import Mesh

EDGES = ("forward", "backward", "forward wrap", "backward wrap")


class Transfer(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Links:
    """The links of the pipeline that this process belongs to.

    ranks: the global ranks of this pipeline, in stage order.
    """

    def __init__(self, ranks: Sequence[int], groups: dict[str, Any], control: Any) -> None:
        self.ranks, self._groups, self._control = list(ranks), groups, control
        self.rank = self.ranks.index(dist.get_rank()) if len(self.ranks) > 1 else 0

    @property
    def size(self) -> int:
        """Ranks in the pipeline."""
        return len(self.ranks)

    def send(self, tensor: torch.Tensor, stage: int, direction: str) -> Transfer:
        """Start sending what virtual stage `stage` made: activations `forward`, gradients `backward`."""
        to = self.ranks[(stage + (1 if direction == "forward" else -1)) % self.size]
        return dist.isend(tensor, to, group=self._edge(stage, direction))  # type: ignore[return-value]

    def receive(self, tensor: torch.Tensor, stage: int, direction: str) -> Transfer:
        """Start receiving into `tensor` what virtual stage `stage` needs."""
        source = stage + (-1 if direction == "forward" else 1)
        edge = self._edge(source, direction)
        return dist.irecv(tensor, self.ranks[source % self.size], group=edge)  # type: ignore[return-value]

    def edge(self, stage: int, direction: str) -> str:
        """The name of the edge over which virtual stage `stage` sends in `direction`."""
        last = stage % self.size == (self.size - 1 if direction == "forward" else 0)
        return f"{direction} wrap" if last else direction

    def _edge(self, stage: int, direction: str) -> Any:
        return self._groups[self.edge(stage, direction)]

    def warm_up(self, token: torch.Tensor) -> None:
        """Send `token` once over every edge, one after another; collective.

        NCCL makes the communicator of a pair at its first transfer and holds the host until both sides are there. Left
        to the first step, a receive that is posted early would hold the rank that has yet to send something else.
        """
        for direction, step in (("forward", 1), ("backward", -1)):
            for stage in range(self.size):
                partner = (stage + step) % self.size
                if stage == self.rank:
                    dist.send(token, self.ranks[partner], group=self._edge(stage, direction))
                elif partner == self.rank:
                    dist.recv(token, self.ranks[stage], group=self._edge(stage, direction))

    def gather_facts(self, facts: Sequence[int]) -> list[list[int]]:
        """The host integers `facts` of every rank of the pipeline, in stage order; waits for all of them."""
        if self.size == 1:
            return [list(facts)]
        mine = torch.tensor(facts, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(every, mine, group=self._control)
        return [row.tolist() for row in every]

    def sum(self, tensor: torch.Tensor) -> None:
        """Add `tensor` up over the ranks of the pipeline, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._groups["forward"])


def make_links(mesh: Mesh) -> Links:
    """The links of this process's pipeline. Collective: every process of the mesh calls it."""
    if mesh.size("pp") == 1:
        return Links([mesh.rank], {}, None)
    mine = None
    for ranks in pipelines(mesh):
        groups = {edge: dist.new_group(ranks) for edge in EDGES}
        control = dist.new_group(ranks, backend="gloo")
        if mesh.rank in ranks:
            mine = Links(ranks, groups, control)
    assert mine is not None and mesh.devices is not None
    mine.warm_up(torch.zeros(1, device=mesh.devices.device_type))
    return mine


def pipelines(mesh: Mesh) -> list[list[int]]:
    """The global ranks of every pipeline of the mesh, each in stage order: those that differ in `pp` only."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        place = mesh.layout.coordinates(rank)
        found.setdefault((place["dp"], place["cp"], place["tp"]), []).append(rank)
    return list(found.values())
