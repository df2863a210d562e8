"""One optimizer step: any number of microbatches, one loss per real token, nothing that makes the
host wait.

The loss of a microbatch is its sum of token losses divided by the loss tokens of the *whole step*,
so gradients of a step do not depend on how its documents were packed. That count is known on the
host before the step (packs carry host ints) and written to the device by a fill.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from packgraph.graphs.profiler_ranges import profiler_range
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

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
