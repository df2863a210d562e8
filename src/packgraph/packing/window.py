"""Packing a stream: best fit, longest first, over a bounded window of waiting documents.

    stream ──▶ window (sorted by length) ──▶ one pack at a time

The document that has waited longest opens a pack; then always the longest waiting one that still fits joins it, until
none does. So nobody waits for ever, short documents go where padding would be, and the only state is the window.
"""
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from packgraph.packing.batch import HostFacts, PackedBatch
from packgraph.packing.build import fill
from packgraph.packing.capacity import CapacitySet
from packgraph.packing.document import Document
from packgraph.packing.fit import OpenPack
from packgraph.packing.report import PackReport

Tag = TypeVar("Tag")


def build_pack(documents: list[Document], pack: OpenPack, capacities: CapacitySet, report: PackReport) -> PackedBatch:
    """The batch of `documents`, whose totals stand in `pack`, in the smallest capacity that holds them; counted."""
    capacity = pack.capacity(capacities)
    data, loss_tokens = fill(documents, capacity)
    report.count_pack(len(documents), pack.tokens, capacity.tokens)
    return PackedBatch(data, capacity, HostFacts(tuple(len(document) for document in documents), loss_tokens))


class Window(Generic[Tag]):
    """Documents waiting to be packed, each with a tag of the caller (where it came from)."""

    def __init__(self, capacities: CapacitySet, report: PackReport) -> None:
        self._capacities = capacities
        self._report = report
        self._waiting: OrderedDict[int, tuple[Document, Tag]] = OrderedDict()
        self._sorted: list[tuple[int, int]] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def tags(self) -> Iterator[Tag]:
        """Tags of the waiting documents, the longest waiting first: adding them in this order restores the window."""
        return (tag for _, tag in self._waiting.values())

    def add(self, document: Document, tag: Tag) -> None:
        """Let `document` (within the capacities' longest) wait."""
        self._waiting[self._next_number] = (document, tag)
        # Of equal lengths the one that waits longest must be found first, by a search from the right: hence the minus.
        insort(self._sorted, (len(document), -self._next_number))
        self._next_number += 1

    def take(self) -> PackedBatch:
        """Make one pack of waiting documents. Raises IndexError when none waits."""
        if not self._waiting:
            raise IndexError("no document waits to be packed")
        pack = OpenPack()
        oldest = next(iter(self._waiting))
        place = bisect_right(self._sorted, (len(self._waiting[oldest][0]), -oldest)) - 1
        while place >= 0:
            length, minus_number = self._sorted.pop(place)
            pack.add(-minus_number, length)
            place = bisect_right(self._sorted, (pack.room(self._capacities), 0)) - 1
        members = [self._waiting.pop(number)[0] for number in sorted(pack.members)]
        return build_pack(members, pack, self._capacities, self._report)
