"""The recorder's memory: blocks with lifetimes, placed as a caching allocator would place them.

A block lives from the operation that made its storage to the moment the last reference to that
storage went away. When a variant is complete, its blocks are placed first-fit into the pool's
segments (`graphs/recorder/pool.py`), so two blocks share memory exactly when their lifetimes
do not overlap. Variants of one pool start from offset zero again: that is the reuse that makes a
shared pool dangerous, and it is what the tests must be able to see.

First-fit placement of blocks with known lifetimes: how the recorder lays out its pools.

When a variant is complete, its blocks are placed in the order of their births, each at the lowest
place that is free for its whole life, so two blocks share memory exactly when their lifetimes do
not overlap.

    time ->   a [----]        a and c share an offset,
              b    [-------]  b gets its own
              c        [---]
"""

import bisect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from packgraph.graphs.copy_streams import HostMemories
from packgraph.graphs.recorder.copy_streams import plain

POISON = 0xFF


@dataclass
class RecordedStorage:
    """One storage. birth, death: ticks of the window's clock (death None = still referenced).

    scratch: made by a capture after which nothing reads it.
    """

    nbytes: int
    birth: int
    storage: "weakref.ref[torch.UntypedStorage]"
    death: int | None = None
    scratch: bool = False


class RecorderPool:
    """Segments of host memory shared by all variants captured into the pool."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []
        self.host = HostMemories(plain)  # of copies that its graphs hold

    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(segment.numel() for segment in self.segments)

    def poison(self) -> None:
        """Fill all segments with the NaN pattern."""
        for segment in self.segments:
            segment.fill_(POISON)
        self.host.arenas.poison()

    def place(self, blocks: list[RecordedStorage]) -> list[tuple[torch.Tensor, int] | None]:
        """(segment, offset) for every dead block, None for those still referenced; grows the pool
        as needed."""
        sizes = [segment.numel() for segment in self.segments]
        chosen, added = place_blocks(
            sizes, [(block.nbytes, block.birth, block.death) for block in blocks]
        )
        if added:
            self.segments.append(torch.full((added,), POISON, dtype=torch.uint8))
        return [None if c is None else (self.segments[c[0]], c[1]) for c in chosen]


ALIGNMENT = 64


@dataclass
class Segment:
    """Placement in one segment. size: bytes, None = as many as it takes. top: the highest byte in
    use so far.

    used: blocks as (offset, end, death), sorted by offset.
    """

    size: int | None
    used: list[tuple[int, int, int]] = field(default_factory=list)
    top: int = 0

    def place(self, nbytes: int, birth: int, death: int) -> int | None:
        """The offset of a block, or None where it does not fit. Blocks must come in the order of
        their births."""
        self.used = [block for block in self.used if block[2] > birth]
        offset = 0
        for start, end, _ in self.used:
            if offset + nbytes <= start:
                break
            offset = end
        if self.size is not None and offset + nbytes > self.size:
            return None
        bisect.insort(self.used, (offset, offset + nbytes, death))
        self.top = max(self.top, offset + nbytes)
        return offset


def place_blocks(
    sizes: Sequence[int], blocks: Sequence[tuple[int, int, int | None]]
) -> tuple[list[tuple[int, int] | None], int]:
    """(segment, offset) of every block, and the bytes of the segment that must be added (0 = none).

    sizes: of the segments there are, all free. blocks: (bytes, birth, death); those that outlive
    the capture (death None) are not placed. A segment numbered len(sizes) is the one to add.
    """
    plans = [Segment(size) for size in sizes] + [Segment(None)]
    chosen: list[tuple[int, int] | None] = []
    for nbytes, birth, death in blocks:
        found = None
        if death is not None:
            rounded = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
            for index, plan in enumerate(plans):
                offset = plan.place(rounded, birth, death)
                if offset is not None:
                    found = (index, offset)
                    break
        chosen.append(found)
    return chosen, plans[-1].top
