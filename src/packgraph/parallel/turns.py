"""Places in one buffer for units that are needed one after another.

    unit        embed       layer 0   layer 1   layer 2   layer 3   head
    elements    |0 ..... E| |E .. |   |0 .. |   |l .. |   |0 .. |   |0 ..

Neighbours are there at the same time: while one is used the next is on its way. All others may
share elements. The largest get places first, so embedding and head, which are larger than layers,
have the same, and layers alternate within it.
"""

from collections.abc import Sequence


def take_turns(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Starts of the units, and the elements that all of them need. No two neighbours overlap.

    sizes: elements of the units, in the order in which they are used.
    """
    starts = [-1] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        taken = sorted(
            (starts[other], starts[other] + sizes[other])
            for other in (unit - 1, unit + 1)
            if 0 <= other < len(sizes) and starts[other] >= 0
        )
        start = 0
        for first, stop in taken:
            if start + sizes[unit] > first:
                start = max(start, stop)
        starts[unit] = start
    return starts, max((a + n for a, n in zip(starts, sizes, strict=True)), default=0)
