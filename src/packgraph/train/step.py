"""One optimizer step: any number of microbatches, one loss per real token, nothing that makes the
host wait.

The loss of a microbatch is its sum of token losses divided by the loss tokens of the *whole step*,
so gradients of a step do not depend on how its documents were packed. That count is known on the
host before the step (packs carry host ints) and written to the device by a fill.

Which packs a rank runs (`MicrobatchAssignment`):

    replicas    every pack goes to one replica, largest first                       `step.own_share`
    groups      packs stand in the order of the plan, and each is run by the ranks  `groups_share`
                of its group: how many follows from its tokens, which of them from its place in
                    the step

The invariant: every rank knows the share of every other, from host ints alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class StepSource(Protocol):
    """A stream whose steps are planned as a whole."""

    def next_step(self) -> list[PackedBatch]:
        """The packs of the next step; none at the end."""
        ...


Packs = Iterator[PackedBatch] | StepSource


def take_step(packs: Packs, tokens_per_step: int) -> list[PackedBatch]:
    """Packs from `packs` until they hold `tokens_per_step` real tokens (or `packs` ends); a step as
    it is planned."""
    if isinstance(packs, StepSource):
        return packs.next_step()
    taken: list[PackedBatch] = []
    while sum(pack.num_tokens for pack in taken) < tokens_per_step:
        pack = next(packs, None)
        if pack is None:
            break
        taken.append(pack)
    return taken


def own_share(
    batches: Sequence[PackedBatch], replicas: int, replica: int, together: int = 1
) -> list[PackedBatch]:
    """The packs of a step that one of `replicas` runs, in the order of the step.

    together: consecutive replicas that share experts, so that each of their microbatches is one
        exchange among all of
    them: they must run packs of equal capacity at the same time. Where a step has too few, some run
        an empty one.

    Every replica reads the whole stream, so all of them know the whole step from host ints alone,
    and the position in the data does not depend on how many there are. The largest packs are dealt
    out first, each to the replica with the fewest places so far (Graham 1969: at most 4/3 of the
    best possible longest share).
    """
    rounds = _rounds(batches, together)
    places = [0] * (replicas // together)
    share: set[int] = set()
    for index in sorted(range(len(rounds)), key=lambda index: -rounds[index][0].capacity.tokens):
        least = min(range(len(places)), key=lambda candidate: places[candidate])
        places[least] += rounds[index][0].capacity.tokens
        if least == replica // together:
            share.add(index)
    return [batches[replica % together] for index, batches in enumerate(rounds) if index in share]


def _rounds(batches: Sequence[PackedBatch], together: int) -> list[list[PackedBatch]]:
    """Packs of equal capacity, `together` at a time, filled up with empty ones; in the order of
    their first packs."""
    rounds: list[list[PackedBatch]] = []
    open_rounds: dict[Capacity, list[PackedBatch]] = {}
    for batch in batches:
        found = open_rounds.setdefault(batch.capacity, [])
        if not found:
            rounds.append(found)
        found.append(batch)
        if len(found) == together:
            del open_rounds[batch.capacity]
    for capacity, found in open_rounds.items():
        found += [PackedBatch.empty(capacity)] * (together - len(found))
    return rounds


def count_loss_tokens(batches: Sequence[PackedBatch]) -> int:
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
    """How steps are shared out. replicas: ranks, or groups of them, with microbatches of their own;
    replica: this one.

    together: replicas that share experts; see `own_share`. rank_tokens: of any row, where rows are
    those of groups of a changing size (dynamic context parallelism) and a replica is a rank of dp x
    cp; None: replicas are those of dp.
    """

    replicas: int = 1
    replica: int = 0
    together: int = 1
    rank_tokens: int | None = None

    @staticmethod
    def of(mesh: Mesh, rank_tokens: int | None = None) -> "MicrobatchAssignment":
        """That of a run over `mesh`."""
        if rank_tokens is None:
            return MicrobatchAssignment(
                mesh.layout.replicas(mesh.world), mesh.replica, mesh.size("ep")
            )
        ranks, place = mesh.size("cp"), mesh.replica * mesh.size("cp") + mesh.place["cp"]
        return MicrobatchAssignment(
            mesh.layout.replicas(mesh.world) * ranks, place, rank_tokens=rank_tokens
        )

    def share(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """This replica's packs of a step."""
        return self.share_of(batches, self.replica)

    def share_of(self, batches: Sequence[PackedBatch], replica: int) -> list[PackedBatch]:
        """The packs of a step that a replica runs, in its order. Raises ValueError for groups that
        are no microsteps."""
        if self.rank_tokens is None:
            return own_share(batches, self.replicas, replica, self.together)
        return [
            batch
            for batch, ranks in groups_of(batches, self.rank_tokens, self.replicas)
            if replica in ranks
        ]


def groups_of(
    batches: Sequence[PackedBatch], rank_tokens: int, world: int
) -> Iterator[tuple[PackedBatch, range]]:
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
