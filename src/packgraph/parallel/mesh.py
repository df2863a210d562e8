"""Which process does what: one device mesh with the axes (dp, pp, cp, tp).

    rank = ((dp * PP + pp) * CP + cp) * TP + tp         tp is innermost: its ranks talk most and
                                                        share a host

    dp      0 1 2 3 4 5 6 7       replicas of everything but experts
    ep      |0 1 2 3|0 1 2 3|     EP = 4: consecutive replicas that share the experts of a layer
    edp     |0      |1      |     replicas of the same experts: dp = edp * EP + ep

    cp      |0 1|           ranks that share every row of their replica
    dp_cp   all ranks of dp x cp: each has its own tokens, so gradients are summed over all of them;
        edp_cp: of edp x cp

dp: replicas that see different documents; pp: stages of the pipeline; cp: parts of a row of tokens;
tp: parts of every matrix; ep: parts of the experts of every layer, within dp. The invariant: every
process computes the same layout from the same numbers, and an impossible one is refused with all
reasons before any process group exists.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "pp", "cp", "tp")
JOINED = {"dp_cp": "dp", "edp_cp": "edp"}


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. dp: None = all ranks that the other axes leave over. ep: divides dp.

    contexts: how many ranks may share a row where that changes from microbatch to microbatch,
    divisors of cp; a group is a block of consecutive ranks of the `cp` axis. Empty: always cp.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    contexts: tuple[int, ...] = ()

    def problems(self, world: int) -> list[str]:
        """All reasons why this layout cannot be laid over `world` processes."""
        found = [
            f"{axis} = {size} must be at least 1"
            for axis in (*AXES, "ep")
            if (size := getattr(self, axis)) is not None and size < 1
        ]
        if found:
            return found
        found = [
            f"contexts: {size} ranks that share a row must divide cp = {self.cp}"
            for size in self.contexts
            if size < 1 or self.cp % size
        ]
        inner = self.pp * self.cp * self.tp
        if self.dp is None and world % inner:
            found.append(
                f"pp {self.pp} x cp {self.cp} x tp {self.tp} = {inner} processes do not divide the "
                f"{world} "
                "that were started; start a multiple (torchrun --nproc-per-node)"
            )
        if self.dp is not None and self.dp * inner != world:
            found.append(
                f"dp {self.dp} x pp {self.pp} x cp {self.cp} x tp {self.tp} needs "
                f"{self.dp * inner} "
                f"processes, but {world} were started; start as many (torchrun --nproc-per-node), "
                "or leave "
                "out dp, which then follows"
            )
        replicas = world // inner if self.dp is None else self.dp
        if (self.dp is not None or world % inner == 0) and replicas % self.ep:
            found.append(
                f"ep {self.ep} does not divide dp {replicas}: the experts of a layer are shared by "
                "ep "
                f"consecutive replicas; start a multiple of {inner * self.ep} processes (torchrun "
                "--nproc-per-node), or lower ep"
            )
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

    def replica_ranks(self) -> dict[str, list[list[int]]]:
        """The ranks of every group along `dp_cp` (they hold the same parameters) and along `edp_cp`
        (the same experts), in ascending order; the layout must be resolved."""
        found: dict[str, dict[tuple[int, ...], list[int]]] = {"dp_cp": {}, "edp_cp": {}}
        for rank in range((self.dp or 1) * self.pp * self.cp * self.tp):
            place = self.coordinates(rank)
            found["dp_cp"].setdefault((place["pp"], place["tp"]), []).append(rank)
            found["edp_cp"].setdefault(
                (place["dp"] % self.ep, place["pp"], place["tp"]), []
            ).append(rank)
        return {axis: list(groups.values()) for axis, groups in found.items()}

    def context_ranks(self, size: int) -> list[list[int]]:
        """The ranks of every block of `size` consecutive ranks along `cp`; the layout must be
        resolved."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range((self.dp or 1) * self.pp * self.cp * self.tp):
            place = self.coordinates(rank)
            block = place["dp"], place["pp"], place["tp"], place["cp"] // size
            found.setdefault(block, []).append(rank)
        return list(found.values())

    def expert_ranks(self) -> dict[str, list[list[int]]]:
        """The ranks of every group along `ep` (they exchange tokens) and along `edp` (they hold the
        same experts), in the order of their places; the layout must be resolved."""
        replicas, inner = self.dp or 1, self.pp * self.cp * self.tp
        blocks = [range(start, start + self.ep) for start in range(0, replicas, self.ep)]
        alike = [range(place, replicas, self.ep) for place in range(self.ep)]
        return {
            axis: [
                [dp * inner + rest for dp in members]
                for members, rest in itertools.product(sets, range(inner))
            ]
            for axis, sets in (("ep", blocks), ("edp", alike))
        }


@dataclass(frozen=True)
class Mesh:
    """This process's place among all of them.

    place: along each axis, `ep` and `edp` too. devices: torch's mesh, None when there is one
    process only. made: this rank's groups that are no axis of it: along `ep` and `edp` where
    experts are shared, along `dp_cp` and `edp_cp` where rows are; `context N`: the N ranks that
    share a row with this one where their number changes.
    """

    layout: Layout
    rank: int
    place: Mapping[str, int]
    devices: DeviceMesh | None
    made: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.size("dp") * self.size("pp") * self.size("cp") * self.size("tp")

    def size(self, axis: str) -> int:
        """Ranks along `axis`; `edp`: replicas that hold the same experts, dp / ep; `dp_cp`,
        `edp_cp`: times cp."""
        if axis in JOINED:
            return self.size(JOINED[axis]) * self.size("cp")
        if axis == "edp":
            return self.size("dp") // self.size("ep")
        return int(getattr(self.layout, axis))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None where the axis has one rank, so nothing
        is to be sent."""
        if self.devices is None or self.size(axis) == 1:
            return None
        if axis in JOINED:
            return self.made[axis] if self.size("cp") > 1 else self.group(JOINED[axis])
        if axis in ("ep", "edp") and self.size("ep") > 1:
            return self.made[axis]
        return self.devices.get_group("dp" if axis == "edp" else axis)

    def context_group(self, size: int) -> dist.ProcessGroup:
        """The process group of the `size` ranks, of layout.contexts or cp, that share rows with
        this one."""
        group = self.group("cp") if size == self.size("cp") else self.made[_context(size)]
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
    sizes = tuple(int(getattr(resolved, axis)) for axis in AXES)
    devices = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    return Mesh(resolved, rank, _place(resolved, rank), devices, _made_groups(resolved, rank))


def _place(layout: Layout, rank: int) -> dict[str, int]:
    place = layout.coordinates(rank)
    return place | {"ep": place["dp"] % layout.ep, "edp": place["dp"] // layout.ep}


def _context(size: int) -> str:
    return f"context {size}"


def context_sizes(cp: int) -> tuple[int, ...]:
    """How many ranks may share a row where it is at most `cp`: cp and the powers of two that divide
    it, ascending."""
    return tuple(
        sorted({cp, *(1 << power for power in range(cp.bit_length()) if cp % (1 << power) == 0)})
    )


def _made_groups(layout: Layout, rank: int) -> dict[str, dist.ProcessGroup]:
    """This rank's groups that are no axis of torch's mesh. Collective: all ranks make all groups,
    in one order."""
    mine: dict[str, dist.ProcessGroup] = {}
    # The largest groups first: they take most memory.
    wanted = {
        _context(size): layout.context_ranks(size)
        for size in sorted(layout.contexts, reverse=True)
        if 1 < size < layout.cp
    }
    wanted |= layout.expert_ranks() if layout.ep > 1 else {}
    wanted |= layout.replica_ranks() if layout.cp > 1 else {}
    for axis, groups in wanted.items():
        for ranks in groups:
            # A communicator of their own even where ranks are those of dp or cp: reductions of
            # gradients, which start in the middle of a backward, must not stand in one queue with
            # the exchange of tokens or of heads.
            made = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks and made is not None:
                mine[axis] = made
    return mine
