"""One optimizer step: any number of microbatches, one loss per real token, nothing that makes the host wait.

The loss of a microbatch is its sum of token losses divided by the loss tokens of the *whole step*, so gradients of a
step do not depend on how its documents were packed. That count is known on the host before the step (packs carry
host ints) and written to the device by a fill.
"""
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from packgraph.packing.batch import PackedBatch

LossFunction = Callable[[PackedBatch, Tensor], Tensor]


def take_step(packs: Iterator[PackedBatch], tokens_per_step: int) -> list[PackedBatch]:
    """Packs from `packs` until they hold `tokens_per_step` real tokens (or `packs` ends)."""
    taken: list[PackedBatch] = []
    while sum(pack.num_tokens for pack in taken) < tokens_per_step:
        pack = next(packs, None)
        if pack is None:
            break
        taken.append(pack)
    return taken


def accumulate(loss_function: LossFunction, batches: Sequence[PackedBatch], device: torch.device, *,
               in_flight: bool = False) -> Tensor:
    """Forward and backward of all microbatches of a step; gradients are added to `.grad`.

    batches: packs on the host; each is uploaded once. in_flight: run all forwards before the first backward (the
    backwards then go in reverse), as pipelines do. Returns the mean loss per loss token, float32 [] on the device.
    """
    loss_tokens = max(1, sum(batch.num_loss_tokens for batch in batches))
    tokens_in_step = torch.full((), loss_tokens, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    waiting: list[Tensor] = []
    for batch in batches:
        loss = loss_function(batch.to(device), tokens_in_step)
        total += loss.detach()
        if in_flight:
            waiting.append(loss)
        else:
            loss.backward()
    while waiting:
        waiting.pop().backward()
    return total
