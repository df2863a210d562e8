"""The recorder's memory: blocks with lifetimes, placed as a caching allocator would place them.

A block lives from the operation that made its storage to the moment the last reference to that storage went away.
When a variant is complete, its blocks are placed first-fit in the order of their births into the pool's segments, so
two blocks share memory exactly when their lifetimes do not overlap. Variants of one pool start from offset zero
again: that is the reuse that makes a shared pool dangerous, and it is what the tests must be able to see.

    time ->   a [----]        a and c share an offset,
              b    [-------]  b gets its own
              c        [---]
"""
import bisect
import weakref
from dataclasses import dataclass, field

import torch

ALIGNMENT = 64
POISON = 0xFF


@dataclass
class Block:
    """One storage. birth, death: ticks of the window's clock (death None = still referenced).

    brief: made by a capture after which nothing reads it.
    """

    nbytes: int
    birth: int
    storage: "weakref.ref[torch.UntypedStorage]"
    death: int | None = None
    brief: bool = False


@dataclass
class _Segment:
    """Placement state of one segment: blocks in use as (offset, end, death), sorted by offset."""

    size: int | None
    used: list[tuple[int, int, int]] = field(default_factory=list)
    top: int = 0

    def place(self, nbytes: int, birth: int, death: int) -> int | None:
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


class RecorderPool:
    """Segments of host memory shared by all variants captured into the pool."""

    def __init__(self) -> None:
        self.segments: list[torch.Tensor] = []

    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(segment.numel() for segment in self.segments)

    def poison(self) -> None:
        """Fill all segments with the NaN pattern."""
        for segment in self.segments:
            segment.fill_(POISON)

    def place(self, blocks: list[Block]) -> list[tuple[torch.Tensor, int] | None]:
        """(segment, offset) for every dead block, None for those still referenced; grows the pool as needed."""
        plans = [_Segment(segment.numel()) for segment in self.segments] + [_Segment(None)]
        chosen: list[tuple[int, int] | None] = []
        for block in blocks:
            if block.death is None:
                chosen.append(None)
                continue
            nbytes = max(ALIGNMENT, -(-block.nbytes // ALIGNMENT) * ALIGNMENT)
            for index, plan in enumerate(plans):
                offset = plan.place(nbytes, block.birth, block.death)
                if offset is not None:
                    chosen.append((index, offset))
                    break
        if plans[-1].top:
            self.segments.append(torch.full((plans[-1].top,), POISON, dtype=torch.uint8))
        return [None if c is None else (self.segments[c[0]], c[1]) for c in chosen]
