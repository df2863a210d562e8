"""Layout of ranks along the axes (dp, pp, cp, tp) and whatever others it names, without torch.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Shard = Literal["none", "gradients", "parameters"]
SHARDS: tuple[Shard, ...] = ("none", "gradients", "parameters")  # each takes less than the last


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


def context_sizes(cp: int, least: int = 1) -> tuple[int, ...]:
    """Numbers of ranks that may share a row, from `least` to `cp`: cp and the powers of two that
    divide it, ascending."""
    return tuple(size for size in sorted({cp, *powers_of_two(cp)}) if size >= least)


def powers_of_two(number: int) -> tuple[int, ...]:
    """The powers of two that divide `number`, ascending."""
    return tuple(1 << bit for bit in range(number.bit_length()) if number % (1 << bit) == 0)
