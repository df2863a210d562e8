"""Which process does what: one device mesh with the axes (dp, pp, cp, tp).

    rank = ((dp * PP + pp) * CP + cp) * TP + tp         tp is innermost: its ranks talk most and share a host

dp: replicas that see different documents; pp: stages of the pipeline; cp: parts of a row of tokens; tp: parts of every
matrix. The invariant: every process computes the same layout from the same numbers, and an impossible one is refused
with all reasons before any process group exists.
"""
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "pp", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. dp: None = all ranks that the other axes leave over."""

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def problems(self, world: int) -> list[str]:
        """All reasons why this layout cannot be laid over `world` processes."""
        found = [f"{field.name} = {size} must be at least 1" for field in fields(self)
                 if (size := getattr(self, field.name)) is not None and size < 1]
        if found:
            return found
        inner = self.pp * self.cp * self.tp
        if self.dp is None and world % inner:
            found.append(f"pp {self.pp} x cp {self.cp} x tp {self.tp} = {inner} processes do not divide the {world} "
                         "that were started")
        if self.dp is not None and self.dp * inner != world:
            found.append(f"dp {self.dp} x pp {self.pp} x cp {self.cp} x tp {self.tp} needs {self.dp * inner} "
                         f"processes, but {world} were started; start as many (torchrun --nproc-per-node), or leave "
                         "out dp, which then follows")
        return found

    def resolved(self, world: int) -> "Layout":
        """The layout with dp filled in. Raises ValueError with all reasons."""
        problems = self.problems(world)
        if problems:
            raise ValueError("; ".join(problems))
        return replace(self, dp=world // (self.pp * self.cp * self.tp))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> place of `rank` along it; the layout must be resolved."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            place[axis] = rank % getattr(self, axis)
            rank //= getattr(self, axis)
        return {axis: place[axis] for axis in AXES}


@dataclass(frozen=True)
class Mesh:
    """This process's place among all of them. devices: torch's mesh, None when there is one process only."""

    layout: Layout
    rank: int
    place: Mapping[str, int]
    devices: DeviceMesh | None

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.size("dp") * self.size("pp") * self.size("cp") * self.size("tp")

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return int(getattr(self.layout, axis))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None where the axis has one rank, so nothing is to be sent."""
        return self.devices.get_group(axis) if self.devices is not None and self.size(axis) > 1 else None

    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all processes, None when there is one."""
        return dist.group.WORLD if self.world > 1 else None

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The one-dimensional device mesh along `axis`. Raises RuntimeError in a single process."""
        if self.devices is None:
            raise RuntimeError(f"there is one process only, so there is no device mesh along {axis!r}")
        return self.devices[axis]


def single_process() -> Mesh:
    """The mesh of a process on its own."""
    layout = Layout(1)
    return Mesh(layout, 0, layout.coordinates(0), None)


def make_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of this process in `layout` over the initialised default process group.

    Raises ValueError with all reasons when the layout does not fit the number of processes.
    """
    if not dist.is_initialized():
        layout.resolved(1)
        return single_process()
    resolved, rank = layout.resolved(dist.get_world_size()), dist.get_rank()
    sizes = tuple(int(getattr(resolved, axis)) for axis in AXES)
    devices = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    return Mesh(resolved, rank, resolved.coordinates(rank), devices)
