"""Sizes of rows whose sums lie close to what is to be packed, for documents that are packed a batch
at a time.

A batch of X tokens goes into as few rows as the largest size needs; all but a few of them are of
the largest size and full, and the packer looks for sizes of the last few whose sum is just enough
(packing/tighten.py). Documents are short against rows, so X counts and not how it is cut: padding
is the distance from X to the next sum,

    places(X) = (R - f) * largest + min{s1 + … + sf >= X - (R - f) * largest},   R = ceil(X /
    largest), f = min(R, 3)

and a set of sizes is as good as the mean of places(X) over the batches. Sizes are moved one at a
time while that falls; what they are worth is decided by really packing into them (buckets.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FREE_ROWS = 3
MOST_STEPS = 64  # places that a size is tried at
MOST_ROUNDS = 20

Ints = NDArray[np.int64]


def covering_places(batches: Ints, sizes: Sequence[int]) -> int:
    """Places that batches of so many tokens (int64 [n]) take in rows of `sizes`, if documents could
    be cut anywhere."""
    largest = max(sizes)
    sums = [np.zeros(1, dtype=np.int64)]
    for _ in range(FREE_ROWS):
        sums.append(np.unique((sums[-1][:, None] + np.array(sizes)[None, :]).reshape(-1)))
    rows = -(-batches // largest)
    total = 0
    for free in range(1, FREE_ROWS + 1):
        chosen = rows == free if free < FREE_ROWS else rows >= free
        full = (rows[chosen] - free) * largest
        total += int((full + sums[free][np.searchsorted(sums[free], batches[chosen] - full)]).sum())
    return total


def covering_sizes(
    batches: Sequence[int], largest: int, count: int, multiple: int
) -> tuple[int, ...]:
    """`count` sizes, ascending, the last of them `largest`, that cover batches of so many tokens
    with few places.

    Sizes are multiples of `multiple`, or fewer than `count` when there are not so many of them. The
    same for the same arguments; a local optimum.
    """
    step = multiple
    while largest // step > MOST_STEPS:
        step *= 2
    places = [*range(step, largest, step)]
    count = min(count, len(places) + 1)
    tokens = np.array(batches, dtype=np.int64)
    sizes = (
        sorted({places[len(places) * number // (count - 1)] for number in range(count - 1)})
        if count > 1
        else []
    )
    best = covering_places(tokens, [*sizes, largest])
    for _ in range(MOST_ROUNDS):
        before = best
        for index in range(len(sizes)):
            others = [*sizes[:index], *sizes[index + 1 :], largest]
            found = min(
                (covering_places(tokens, [*others, place]), place)
                for place in places
                if place not in others
            )
            if found[0] < best:
                best, sizes[index] = found
        if best == before:
            break
    return (*sorted(sizes), largest)
