"""Which of the waiting documents make the next pack, from their lengths alone.

    lengths ──▶ waiting (sorted by length) ──▶ one pack at a time

The document that has waited longest opens a pack; then always the longest waiting one that still
fits joins it, until none does. So nobody waits for ever, and short documents go where padding would
be. `Window` packs by this, and plans that need to know what the packer will do run it without
documents.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from packgraph.packing.capacity import CapacitySet
from packgraph.packing.fit import OpenPack
from packgraph.packing.tighten import best_fit


class WaitingLengths:
    """Lengths of waiting documents, in places, numbered in the order they came."""

    def __init__(self, capacities: CapacitySet) -> None:
        self._capacities = capacities
        # An OrderedDict finds its first entry at once; a dict would step over all that were taken
        # before it.
        self._lengths: OrderedDict[int, int] = OrderedDict()
        self._sorted: list[tuple[int, int]] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, length: int) -> int:
        """Let a document of `length` tokens (within the capacities' longest) wait; returns its
        number."""
        number, length = self._next_number, self._capacities.places(length)
        self._lengths[number] = length
        # Of equal lengths the one that waits longest must be found first, by a search from the
        # right: hence the minus.
        insort(self._sorted, (length, -number))
        self._next_number += 1
        return number

    def take(self) -> OpenPack:
        """Make one pack; its members are numbers, in the order they came. Raises IndexError when
        none waits."""
        if not self._lengths:
            raise IndexError("no document waits to be packed")
        pack = OpenPack()
        oldest = next(iter(self._lengths))
        place = bisect_right(self._sorted, (self._lengths[oldest], -oldest)) - 1
        while place >= 0:
            length, minus_number = self._sorted.pop(place)
            pack.add(-minus_number, length)
            del self._lengths[-minus_number]
            place = bisect_right(self._sorted, (pack.room(self._capacities), 0)) - 1
        pack.members.sort()
        return pack


def pack_lengths(
    lengths: Iterable[int], capacities: CapacitySet, *, window: int | None
) -> Iterator[OpenPack]:
    """The packs that `packgraph.pack` and `pack_stream` make of documents of `lengths`, each within
    the capacities.

    window: documents that wait at most; None packs all at once. Members are places in `lengths`.
    """
    if window is None:
        yield from best_fit(list(lengths), capacities)
        return
    waiting = WaitingLengths(capacities)
    for length in lengths:
        waiting.add(length)
        if len(waiting) >= window:
            yield waiting.take()
    while len(waiting):
        yield waiting.take()
