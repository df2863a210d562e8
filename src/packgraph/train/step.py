"""One optimizer step: any number of microbatches, one loss per real token, nothing that makes the
host wait.

The loss of a microbatch is its sum of token losses divided by the loss tokens of the *whole step*,
so gradients of a step do not depend on how its documents were packed. That count is known on the
host before the step (packs carry host ints) and written to the device by a fill.

Which packs a rank runs (`MicrobatchAssignment`):

    replicas    every pack goes to one replica, largest first                       `step.shares`
    groups      packs stand in the order of the plan, and each is run by the ranks  `groups_share`
                of its group: how many follows from its tokens, which of them from its place in
                    the step

The invariant: every rank knows the share of every other, from host ints alone.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from packgraph.graphs.backend import profiler_range
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh

LossFunction = Callable[[PackedBatch, Tensor], Tensor]


class BeforeLast(Protocol):
    """Called before a backward that is the last one to add to the gradients of `settled` (None =
    all parameters)."""

    def __call__(self, output: Tensor, settled: Sequence[Tensor] | None = None) -> None: ...


class StepPack(Protocol):
    """Facts of a pack that all ranks know: a `PackedBatch`, or a `PlannedPack` of it."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_loss_tokens(self) -> int: ...

    @property
    def num_pairs(self) -> int: ...


Pack = TypeVar("Pack", bound=StepPack)


@runtime_checkable
class StepSource(Protocol[Pack]):
    """A stream whose steps are planned as a whole."""

    def next_step(self) -> list[Pack]:
        """The packs of the next step; none at the end."""
        ...


Packs = Iterator[PackedBatch] | StepSource[PackedBatch]


def take_step(packs: Iterator[Pack] | StepSource[Pack], tokens_per_step: int) -> list[Pack]:
    """Packs from `packs` until they hold `tokens_per_step` real tokens (or `packs` ends); a step as
    it is planned."""
    if isinstance(packs, StepSource):
        return packs.next_step()
    taken: list[Pack] = []
    tokens = 0
    while tokens < tokens_per_step:
        pack = next(packs, None)
        if pack is None:
            break
        taken.append(pack)
        tokens += pack.num_tokens
    return taken


def own_share(
    batches: Sequence[Pack], replicas: int, replica: int, together: int = 1
) -> list[Pack | PackedBatch]:
    """The packs of a step that one of `replicas` runs, in its order; see `shares`."""
    return shares(batches, replicas, together)[replica]


def shares(
    batches: Sequence[Pack], replicas: int, together: int = 1
) -> list[list[Pack | PackedBatch]]:
    """The packs of a step that each of `replicas` runs. Those of replicas that run nothing together
    are in the order of the step, rounds in that of their first packs.

    together: consecutive replicas that share experts, or the parts of layers, so that each of their
        microbatches is one exchange among all of
    them: they must run packs of equal capacity at the same time. Where a step has too few, some run
        an empty one.

    Every replica knows the lengths of the whole stream, so all of them know the whole step from
    host ints alone, and the position in the data does not depend on how many there are. The largest
    packs are dealt out first, each to the replica with the fewest places so far (Graham 1969: at
    most 4/3 of the best possible longest share).
    """
    rounds = _rounds(batches, together)
    places = [(0, team) for team in range(replicas // together)]  # a heap
    teams: list[list[int]] = [[] for _ in places]
    for index in sorted(range(len(rounds)), key=lambda index: -rounds[index][0].capacity.tokens):
        least, team = places[0]
        heapq.heapreplace(places, (least + rounds[index][0].capacity.tokens, team))
        teams[team].append(index)
    return [
        [rounds[index][replica % together] for index in sorted(teams[replica // together])]
        for replica in range(replicas)
    ]


def _rounds(batches: Sequence[Pack], together: int) -> list[list[Pack | PackedBatch]]:
    """Packs of equal capacity, `together` at a time, filled up with empty ones; in the order of
    their first packs.

    Ranks wait for each other in every round. So packs of a round are those whose attention takes
    about as long: neighbours in the order of their pairs. Among equal ones the order of the step
    counts. The fewest pairs have empty packs beside them.
    """
    if together == 1:
        return [[batch] for batch in batches]
    places: dict[Capacity, list[int]] = {}
    for place, batch in enumerate(batches):
        places.setdefault(batch.capacity, []).append(place)
    chosen: list[list[int]] = []
    for found in places.values():
        found.sort(key=lambda place: -batches[place].num_pairs)
        chosen += [found[n : n + together] for n in range(0, len(found), together)]
    rounds = list[list[Pack | PackedBatch]]()
    for some in sorted(chosen, key=min):
        packs: list[Pack | PackedBatch] = [batches[place] for place in some]
        packs += [PackedBatch.empty(packs[0].capacity)] * (together - len(some))
        rounds.append(packs)
    return rounds


def count_loss_tokens(batches: Sequence[StepPack]) -> int:
    """Places of a whole step whose label is a token, at least 1."""
    return max(1, sum(batch.num_loss_tokens for batch in batches))


def accumulate(
    loss_function: LossFunction,
    batches: Sequence[PackedBatch],
    device: torch.device,
    *,
    in_flight: bool = False,
    loss_tokens: int | None = None,
    before_last: BeforeLast | None = None,
) -> Tensor:
    """Forward and backward of all microbatches of a step; gradients are added to `.grad`.

    batches: packs on the host; each is uploaded once. in_flight: run all forwards before the first
    backward (the backwards then go in reverse), as pipelines do. loss_tokens: of the whole step,
    when `batches` are a share of it. before_last: called with the loss whose backward is the last.
    Returns the sum of token losses / loss_tokens, float32 [] on the device.
    """
    loss_tokens = count_loss_tokens(batches) if loss_tokens is None else loss_tokens
    tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    waiting: list[Tensor] = []
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        with profiler_range("microbatch", number, batch.capacity):
            loss = loss_function(batch.to(device), tokens_in_step)
            total += loss.detach()
            waiting.append(loss)
            if in_flight and not is_last:
                continue
            while waiting:
                loss = waiting.pop()
                if before_last is not None and is_last and not waiting:
                    before_last(loss)
                loss.backward()
    return total


@dataclass(frozen=True)
class MicrobatchAssignment:
    """Assignment of microbatches to replicas. replicas: ranks, or groups of them, with microbatches
    of their own; replica: this one.

    together: replicas that share experts; see `shares`. rank_tokens: of any row, where rows are
    those of groups of a changing size (dynamic context parallelism) and a replica is a rank of dp x
    cp; None: replicas are those of dp.
    """

    replicas: int = 1
    replica: int = 0
    together: int = 1
    rank_tokens: int | None = None

    @staticmethod
    def of(
        mesh: Mesh, rank_tokens: int | None = None, *, in_step: bool = False
    ) -> "MicrobatchAssignment":
        """That of a run over `mesh`. in_step: so do all replicas that share layers, if any do."""
        if rank_tokens is None:
            replicas = mesh.layout.replicas(mesh.world)
            shares = in_step and mesh.layout.shard_ranks > 0
            alike = in_step and not shares
            together = replicas if alike else mesh.layout.sharing_replicas(sharded=shares)
            return MicrobatchAssignment(replicas, mesh.replica, together)
        ranks, place = mesh.size("cp"), mesh.replica * mesh.size("cp") + mesh.place["cp"]
        return MicrobatchAssignment(
            mesh.layout.replicas(mesh.world) * ranks, place, rank_tokens=rank_tokens
        )

    def share(self, batches: Sequence[Pack]) -> list[Pack | PackedBatch]:
        """This replica's packs of a step. Raises ValueError as `shares`."""
        return self.shares(batches)[self.replica]

    def shares(self, batches: Sequence[Pack]) -> list[list[Pack | PackedBatch]]:
        """The packs of a step that each replica runs, in its order. Raises ValueError for groups
        that are no microsteps."""
        if self.rank_tokens is None:
            return shares(batches, self.replicas, self.together)
        found: list[list[Pack | PackedBatch]] = [[] for _ in range(self.replicas)]
        for batch, ranks in groups_of(batches, self.rank_tokens, self.replicas):
            for rank in ranks:
                found[rank].append(batch)
        return found


def groups_of(
    batches: Sequence[Pack], rank_tokens: int, world: int
) -> Iterator[tuple[Pack, range]]:
    """Every pack of a planned step with the ranks of its group, of `world`.

    Packs stand microstep by microstep, and in a microstep by their first rank; so their sizes,
    tokens / rank_tokens, say the rest. Raises ValueError where they do not add up to whole
    microsteps of aligned groups.
    """
    first = 0
    for batch in batches:
        size, rest = divmod(batch.capacity.tokens, rank_tokens)
        if rest or not size or first % size or first + size > world:
            raise ValueError(
                f"a pack of {batch.capacity.tokens} tokens cannot start at rank {first} of {world} "
                f"ranks with {rank_tokens} tokens each: groups must fill microstep after microstep"
            )
        yield batch, range(first, first + size)
        first = (first + size) % world
    if first:
        raise ValueError(
            f"the last microstep of a step ends at rank {first} of {world}: its groups must cover "
            "all ranks"
        )
