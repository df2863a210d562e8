"""Packing a stream: best fit, longest first, over a bounded window of waiting documents.

    stream ──▶ window (see `waiting.py` for who goes next) ──▶ one pack at a time

Nobody waits for ever, and the only state is the window.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import CapacitySet
from packgraph.packing.document import Document
from packgraph.packing.fit import OpenPack
from packgraph.packing.report import PackReport
from packgraph.packing.waiting import WaitingLengths

Tag = TypeVar("Tag")


def build_pack(
    documents: list[Document], pack: OpenPack, capacities: CapacitySet, report: PackReport
) -> PackedBatch:
    """The batch of `documents`, whose totals stand in `pack`, in the smallest capacity that holds
    them; counted."""
    capacity = pack.capacity(capacities)
    batch = PackedBatch.of_documents(documents, capacity)
    report.count_pack(batch.num_documents, batch.num_tokens, capacity.tokens)
    return batch


class PackingWindow(Generic[Tag]):
    """Documents waiting to be packed, each with a tag of the caller (where it came from)."""

    def __init__(self, capacities: CapacitySet, report: PackReport) -> None:
        self._capacities = capacities
        self._report = report
        self._lengths = WaitingLengths(capacities)
        self._waiting: dict[int, tuple[Document, Tag]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def tags(self) -> Iterator[Tag]:
        """Tags of the waiting documents, the longest waiting first: adding them in this order
        restores the window."""
        return (tag for _, tag in self._waiting.values())

    def add(self, document: Document, tag: Tag) -> None:
        """Let `document` (within the capacities' longest) wait."""
        self._waiting[self._lengths.add(len(document))] = (document, tag)

    def take(self) -> PackedBatch:
        """Make one pack of waiting documents. Raises IndexError when none waits."""
        pack = self._lengths.take()
        members = [self._waiting.pop(number)[0] for number in pack.members]
        return build_pack(members, pack, self._capacities, self._report)
