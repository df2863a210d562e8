"""Device mesh of a run, with the axes (dp, pp, cp, tp) and whatever others a layout names.

    rank = ((dp * PP + pp) * CP + cp) * TP + tp         tp is innermost: its ranks talk most and
                                                        share a host

    dp      0 1 2 3 4 5 6 7       replicas of everything but experts
    ep      |0 1 2 3|0 1 2 3|     EP = 4: consecutive replicas that share the experts of a layer
    edp     |0      |1      |     replicas of the same experts: dp = edp * EP + ep

    cp      |0 1|           ranks that share every row of their replica
    copies  all ranks of dp x cp: they hold the same parameters and have their own tokens, so
            gradients are summed over all of them; expert_copies: of edp x cp
            |0 1|2 3|       SHARD_RANKS = 2: consecutive copies that share layers, such as those of
                            a host; 0 and 2, 1 and 3 keep the same parts

dp: replicas that see different documents; pp: stages of the pipeline; cp: parts of a row of tokens;
tp: parts of every matrix; ep: parts of the experts of every layer, within dp. Other axes lie
between dp and pp and say themselves whose tokens their ranks have (`Axis`). The invariant: every
process computes the same layout from the same numbers, and an impossible one is refused with all
reasons before any process group exists.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COPIES = {"copies": "dp", "expert_copies": "edp"}


class ShardGroups(NamedTuple):
    """Replicas with which a rank shares layers. shard: those that share them, None = nobody.
    across: those that keep the same parts of them, None = no other."""

    shard: dist.ProcessGroup | None
    across: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh.

    own: what of the data each rank along it has to itself: `packs`, whole microbatches; `rows` of
    every microbatch; nothing, so that all compute the same loss (of pp and tp alone). Ranks with
    data of their own hold copies or parts of parameters, and gradients are summed over the copies.
    """

    name: str
    size: int
    own: Literal["packs", "rows", ""] = ""


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. dp: None = all ranks that the other axes leave over. ep: divides dp.

    contexts: how many ranks may share a row where that changes from microbatch to microbatch,
    divisors of cp; a group is a block of consecutive ranks of the `cp` axis. Empty: always cp.
    more: further axes, from the outermost. shard_ranks: how many consecutive copies share a layer
    where layers are sharded, 0 = all.
    """

    dp: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    contexts: tuple[int, ...] = ()
    more: tuple[Axis, ...] = ()
    shard_ranks: int = 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, from the outermost; dp has size 1 until it is known."""
        return (
            Axis("dp", 1 if self.dp is None else self.dp, own="packs"),
            *self.more,
            Axis("pp", self.pp),
            Axis("cp", self.cp, own="rows"),
            Axis("tp", self.tp),
        )

    @property
    def inner(self) -> int:
        """Ranks of one place along dp."""
        return math.prod(axis.size for axis in self.axes[1:])

    def __str__(self) -> str:
        """For people: the axes of more than one rank, such as `dp 2 x tp 2`."""
        sizes = {axis.name: axis.size for axis in self.axes} | {"ep": self.ep}
        named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(named) or "one rank"

    def replicas(self, world: int) -> int:
        """Number of `world` processes, or groups of them, that have packs of their own."""
        dp = self.dp or max(1, world // max(1, self.inner))
        return dp * math.prod(axis.size for axis in self.more if axis.own == "packs")

    def problems(self, world: int) -> list[str]:
        """All reasons why this layout cannot be laid over `world` processes."""
        found = [
            f"{axis.name} = {axis.size} must be at least 1"
            for axis in (*self.axes, Axis("ep", self.ep))
            if axis.size < 1
        ]
        if found:
            return found
        found = [
            f"contexts: {size} ranks that share a row must divide cp = {self.cp}"
            for size in self.contexts
            if size < 1 or self.cp % size
        ]
        found += [
            f"{axis.name}: ranks of a further axis need packs or rows of their own, since the norm "
            "of the gradient knows copies along tp alone"
            for axis in self.more
            if not axis.own
        ]
        inner = self.inner
        sizes = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes[1:])
        if self.dp is None and world % inner:
            found.append(
                f"{sizes} = {inner} processes do not divide the {world} that were started; start a "
                "multiple (torchrun --nproc-per-node)"
            )
        if self.dp is not None and self.dp * inner != world:
            found.append(
                f"dp {self.dp} x {sizes} needs {self.dp * inner} processes, but {world} were "
                "started; start as many (torchrun --nproc-per-node), or leave out dp, which then "
                "follows"
            )
        replicas = world // inner if self.dp is None else self.dp
        if (self.dp is not None or world % inner == 0) and replicas % self.ep:
            found.append(
                f"ep {self.ep} does not divide dp {replicas}: the experts of a layer are shared by "
                "ep "
                f"consecutive replicas; start a multiple of {inner * self.ep} processes (torchrun "
                "--nproc-per-node), or lower ep"
            )
        elif self.shard_ranks and (self.dp is not None or world % inner == 0):
            found += self._shard_problems(self.replicas(world) * self.cp)
        return found

    def _shard_problems(self, copies: int) -> list[str]:
        """Lists what keeps blocks of `shard_ranks` of so many copies from sharing layers."""
        size, cp = self.shard_ranks, self.cp
        if named := ", ".join(axis.name for axis in self.more if axis.size > 1):
            return [f"shard_ranks {size} is not there yet with further axes ({named})"]
        if copies % size:
            return [
                f"shard_ranks {size} does not divide the {copies} ranks (dp x cp) that hold the "
                f"same layers; choose a divisor of {copies}, or 0 for all of them"
            ]
        if size % cp and cp % size:
            return [
                f"shard_ranks {size} and cp {cp}: one must divide the other, so that ranks that "
                "share layers share whole rows, or parts of one"
            ]
        replicas = max(1, size // cp)
        if replicas % self.ep and self.ep % replicas:
            return [
                f"shard_ranks {size} are {replicas} replicas, and ep {self.ep}: one must divide "
                "the other, so that all ranks that share layers have as many experts in common"
            ]
        return []

    def resolved(self, world: int) -> "Layout":
        """The layout with dp filled in. Raises ValueError with all reasons."""
        problems = self.problems(world)
        if problems:
            raise ValueError("; ".join(problems))
        return replace(self, dp=world // max(1, self.inner))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> place of `rank` along it; the layout must be resolved."""
        place: dict[str, int] = {}
        for axis in reversed(self.axes):
            place[axis.name] = rank % axis.size
            rank //= axis.size
        return dict(reversed(place.items()))

    def grouped(self, key: Callable[[dict[str, int]], object]) -> list[list[int]]:
        """Groups of the ranks whose coordinates have one `key`, in ascending order; the layout must
        be resolved."""
        found: dict[object, list[int]] = {}
        for rank in range((self.dp or 1) * self.inner):
            found.setdefault(key(self.coordinates(rank)), []).append(rank)
        return list(found.values())

    def replica_ranks(self) -> dict[str, list[list[int]]]:
        """The ranks of every group along `copies` (they hold the same parameters) and along
        `expert_copies` (the same experts), in ascending order; the layout must be resolved."""

        def held(place: dict[str, int]) -> tuple[int, ...]:
            return tuple(place[axis.name] for axis in self.axes if not axis.own)

        return {
            "copies": self.grouped(held),
            "expert_copies": self.grouped(lambda place: (place["dp"] % self.ep, held(place))),
        }

    def sharers(self, *, experts: bool = False) -> int:
        """Number of ranks that share a sharded layer, or the `experts` of a layer; the layout must
        be resolved."""
        ranks = self.shard_ranks or math.prod(axis.size for axis in self.axes if axis.own)
        if not experts or ranks <= self.cp:
            return ranks
        return self.cp * max(1, ranks // (self.cp * self.ep))

    def sharing_replicas(self, *, sharded: bool) -> int:
        """Number of consecutive replicas that share experts or sharded layers; the layout must be
        resolved."""
        return max(self.ep, self.sharers() // self.cp) if sharded else self.ep

    def sharing_ranks(self) -> dict[str, list[list[int]]]:
        """Returns groups of ranks where some copies share layers: those that share the parts
        (`copies shard`, `expert_copies shard`), and those that keep the same parts (`copies
        across`, ...)."""
        found: dict[str, list[list[int]]] = {}
        every = self.replica_ranks()
        block = {r: at // self.shard_ranks for g in every["copies"] for at, r in enumerate(g)}
        for axis, groups in every.items() if self.ep > 1 else [("copies", every["copies"])]:
            shares = [
                [list(within) for _, within in itertools.groupby(ranks, block.__getitem__)]
                for ranks in groups
            ]
            found[f"{axis} shard"] = [within for blocks in shares for within in blocks]
            found[f"{axis} across"] = [
                list(alike) for blocks in shares for alike in zip(*blocks, strict=True)
            ]
        return found

    def context_ranks(self, size: int) -> list[list[int]]:
        """The ranks of every block of `size` consecutive ranks along `cp`; the layout must be
        resolved."""
        return self.grouped(lambda at: tuple((at | {"cp": at["cp"] // size}).values()))

    def expert_ranks(self) -> dict[str, list[list[int]]]:
        """The ranks of every group along `ep` (they exchange tokens) and along `edp` (they hold the
        same experts), in the order of their places; the layout must be resolved."""
        return {
            "ep": self.grouped(lambda at: tuple((at | {"dp": at["dp"] // self.ep}).values())),
            "edp": self.grouped(lambda at: tuple((at | {"dp": at["dp"] % self.ep}).values())),
        }


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


def context_sizes(cp: int, least: int = 1) -> tuple[int, ...]:
    """Numbers of ranks that may share a row, from `least` to `cp`: cp and the powers of two that
    divide it, ascending."""
    powers = (1 << power for power in range(cp.bit_length()) if cp % (1 << power) == 0)
    return tuple(size for size in sorted({cp, *powers}) if size >= least)


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
