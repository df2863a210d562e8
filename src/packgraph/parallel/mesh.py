"""Device mesh of a run: process groups along the axes of a `Layout` (parallel/layout.py)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from packgraph.parallel.layout import Layout

COPIES = {"copies": "dp", "expert_copies": "edp"}


class ShardGroups(NamedTuple):
    """Replicas with which a rank shares layers. shard: those that share them, None = nobody.
    across: those that keep the same parts of them, None = no other."""

    shard: dist.ProcessGroup | None
    across: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This process's place among all of them.

    place: along each axis, `ep` and `edp` too. devices: torch's mesh, None when there is one
    process only. made: this rank's groups that are no axis of it: along `ep` and `edp` where
    experts are shared, along `copies` and `expert_copies` where more axes than dp have data of
    their own; those of `Layout.sharing_ranks`; `context N`: the N ranks that share a row with this
    one where their number changes.
    host_group: of all processes, over which they exchange objects of the host; None where there is
    one process only. A thread beside the main one needs its own (`beside`).
    """

    layout: Layout
    rank: int
    place: Mapping[str, int]
    devices: DeviceMesh | None
    made: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    host_group: dist.ProcessGroup | None = None

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(axis.size for axis in self.layout.axes)

    @property
    def tells_loss(self) -> bool:
        """True if this rank tells the loss of its tokens: the first of those that know it."""
        return not any(self.place[axis.name] for axis in self.layout.axes if not axis.own)

    @property
    def replica(self) -> int:
        """This rank's place among `layout.replicas`; places along dp follow each other."""
        place = 0
        for axis in (*self.layout.more, self.layout.axes[0]):
            if axis.own == "packs":
                place = place * axis.size + self.place[axis.name]
        return place

    def size(self, axis: str) -> int:
        """Ranks along `axis`, 1 where the layout has no such axis; `edp`: replicas that hold the
        same experts, dp / ep; `copies`, `expert_copies`: times the ranks of all other axes with
        data of their own."""
        sizes = {found.name: found.size for found in self.layout.axes}
        if axis in COPIES:
            others = (found.size for found in self.layout.axes[1:] if found.own)
            return self.size(COPIES[axis]) * math.prod(others)
        if axis == "edp":
            return sizes["dp"] // self.layout.ep
        return self.layout.ep if axis == "ep" else sizes.get(axis, 1)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None where the axis has one rank, so nothing
        is to be sent."""
        if self.devices is None or self.size(axis) == 1:
            return None
        if axis in COPIES:
            return self.made[axis] if axis in self.made else self.group(COPIES[axis])
        if axis in ("ep", "edp") and self.size("ep") > 1:
            return self.made[axis]
        return self.devices.get_group("dp" if axis == "edp" else axis)

    def shard_groups(self, axis: str) -> ShardGroups:
        """With whom this rank shares layers, and keeps the same parts: of `copies`, or of
        `expert_copies`."""
        if self.layout.shard_ranks in (0, self.size("copies")):
            return ShardGroups(self.group(axis))
        axis = axis if self.layout.ep > 1 else "copies"
        return ShardGroups(*(self.made.get(f"{axis} {which}") for which in ShardGroups._fields))

    def context_group(self, size: int) -> dist.ProcessGroup:
        """The process group of the `size` ranks, of layout.contexts or cp, that share rows with
        this one."""
        group = self.group("cp") if size == self.size("cp") else self.made[f"context {size}"]
        assert group is not None
        return group

    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all processes, None when there is one."""
        return dist.group.WORLD if self.world > 1 else None

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The one-dimensional device mesh along `axis`. Raises RuntimeError in a single process."""
        if self.devices is None:
            raise RuntimeError(
                f"there is one process only, so there is no device mesh along {axis!r}"
            )
        return self.devices[axis]


def single_process() -> Mesh:
    """The mesh of a process on its own."""
    layout = Layout(1)
    return Mesh(layout, 0, _place(layout, 0), None)


def make_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of this process in `layout` over the initialised default process group.

    Raises ValueError with all reasons when the layout does not fit the number of processes.
    """
    if not dist.is_initialized():
        layout.resolved(1)
        return single_process()
    resolved, rank = layout.resolved(dist.get_world_size()), dist.get_rank()
    names, sizes = zip(*((axis.name, axis.size) for axis in resolved.axes), strict=True)
    devices = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    made = _made_groups(resolved, rank)
    everyone = dist.group.WORLD if dist.get_world_size() > 1 else None
    return Mesh(resolved, rank, _place(resolved, rank), devices, made, everyone)


def _place(layout: Layout, rank: int) -> dict[str, int]:
    place = layout.coordinates(rank)
    return place | {"ep": place["dp"] % layout.ep, "edp": place["dp"] // layout.ep}


def _made_groups(layout: Layout, rank: int) -> dict[str, dist.ProcessGroup]:
    """This rank's groups that are no axis of torch's mesh. Collective: all ranks make all groups,
    in one order."""
    mine: dict[str, dist.ProcessGroup] = {}
    # The largest groups first: they take most memory.
    wanted = {
        f"context {size}": layout.context_ranks(size)
        for size in sorted(layout.contexts, reverse=True)
        if 1 < size < layout.cp
    }
    wanted |= layout.expert_ranks() if layout.ep > 1 else {}
    wanted |= layout.replica_ranks() if any(a.own and a.size > 1 for a in layout.axes[1:]) else {}
    if layout.shard_ranks not in (0, (layout.dp or 1) * layout.cp):
        wanted |= layout.sharing_ranks()
    for axis, groups in wanted.items():
        for ranks in groups:
            # A communicator of their own even where ranks are those of dp or cp: reductions of
            # gradients, which start in the middle of a backward, must not stand in one queue with
            # the exchange of tokens or of heads.
            made = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks and made is not None:
                mine[axis] = made
    return mine


class Parallelism:
    """One way to spread a run over ranks. Configurations are those of the trainer.

        options     ParallelConfig      how many ranks; `layout` hands them to the mesh
        mesh        Axis, Layout        whose tokens ranks have, hence who adds up gradients
        validation  `problems`          all reasons against it, before any process group exists
        model       `apply`             every rank keeps its part, in place
        verify      `tried`             layouts that `packgraph verify` holds against one process
        gradients   parameters          a plain one is summed over `copies` of the mesh; a part of a
                                        tensor says over whom (`Part.copies`); a DTensor knows it
        checkpoint  parameters          a plain one is stored by one rank; a part says of what it
                                        is one (`Part.shape`, `.offsets`); a DTensor knows it

    What parameters say about themselves is all that gradient reduction, optimizer state and
    checkpoints know, so none of them names an axis. `train/parallelisms.py` has the list.

    Attributes:
        name: Of its axis, and of the option that says how many ranks it has.
    """

    name: ClassVar[str]

    def problems(self, config: Any, world: int) -> list[str]:
        """All reasons why a run of `config` in `world` processes cannot be spread so."""
        return []

    def apply(self, models: Sequence[nn.Module], mesh: Mesh, config: Any) -> None:
        """Spread this rank's chunks of the model, in place. Called on every rank, also where the
        axis has one rank. Collective."""

    def tried(self, layout: Layout) -> list[Layout]:
        """Layouts that verify tries beside `layout`, whose dp is known: this axis takes places of
        dp."""
        return []
