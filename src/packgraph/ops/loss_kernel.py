"""Losses and gradients of logits in one kernel that reads them twice and writes the gradient over
them.

By single operations a row of logits is read and written about ten times, in float32 half of them;
with a vocabulary of 152k that costs as much as the three products with the head. Here every row is
one program: a first pass finds maximum and sum of exponentials (online, Milakov and Gimelshein
2018, arXiv:1805.02867), a second one writes softmax - one_hot in the logits' own dtype. A row of
152k words is larger than shared memory, and those under way are larger than the cache: so the
second pass goes backwards and begins with what was read last, and what it has written is the first
to leave. Nothing is atomic.

The operations it replaces are its specification: `naive_gradient_of_logits` in ops/loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    logits, labels, losses, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, IGNORED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counted = label != IGNORED
    legal = (label >= 0) & (label < SIZE)
    target = tl.where(legal, label, 0)
    start = logits + row * stride
    at_target = tl.load(start + target).to(tl.float32)
    largest = -float("inf")
    total = 0.0
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(
            start + column, mask=column < SIZE, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, 0))
        shift = tl.where(
            larger == -float("inf"), 0.0, larger
        )  # so far nothing but -inf, and inf - inf is no number
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift), 0)
        largest = larger
    log_sum = largest + tl.log(total)
    illegal = tl.where(
        legal, 0.0, float("nan")
    )  # added: there is no number for a word that does not exist
    tl.store(losses + row, tl.where(counted, log_sum - at_target + illegal, 0.0))
    less = at_target - log_sum
    # p - 1 without cancellation: by the series of expm1 where p is close to 1
    series = less * (1.0 + less * (0.5 + less * (1.0 / 6.0 + less * (1.0 / 24.0))))
    gradient_at_target = tl.where(less > -0.1, series, tl.exp(less) - 1.0)
    for before in range(0, SIZE, BLOCK):
        column = (SIZE - 1) // BLOCK * BLOCK - before + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < SIZE, other=-float("inf")).to(tl.float32)
        gradient = tl.where(column == target, gradient_at_target, tl.exp(value - log_sum))
        gradient = tl.where(counted, gradient + illegal, 0.0)
        tl.store(start + column, gradient, mask=column < SIZE, eviction_policy="evict_first")


@torch.library.custom_op("packgraph::logits_to_gradients", mutates_args=("logits", "losses"))
def logits_to_gradients(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Write the loss of every row to `losses` and the gradient of its logits over `logits`.

    logits: [C, V], a float dtype, rows contiguous. labels: int64 [C], -100 = the row does not
    count: loss and gradient are exactly 0, whatever it holds. A label outside [0, V) gives a loss
    and gradients of NaN; nothing is read outside the row. losses: float32 [C]. One operation for
    torch.compile.
    """
    rows, size = logits.shape
    _row[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        SIZE=size,
        BLOCK=min(BLOCK, triton.next_power_of_2(size)),
        IGNORED=-100,
        num_warps=8 if size > 4096 else 4,
    )
