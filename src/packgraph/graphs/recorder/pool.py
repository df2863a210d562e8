"""The recorder's memory: blocks with lifetimes, placed as a caching allocator would place them.

A block lives from the operation that made its storage to the moment the last reference to that
storage went away. When a variant is complete, its blocks are placed first-fit into the pool's
segments (`graphs/recorder/first_fit.py`), so two blocks share memory exactly when their lifetimes
do not overlap. Variants of one pool start from offset zero again: that is the reuse that makes a
shared pool dangerous, and it is what the tests must be able to see.
"""

import weakref
from dataclasses import dataclass

import torch

from packgraph.graphs.copy_streams import HostMemories
from packgraph.graphs.recorder.copy_streams import plain
from packgraph.graphs.recorder.first_fit import place_blocks

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
