"""A model of torch's allocator for CUDA with `expandable_segments:True`: how many bytes a private
pool reserves.

    small blocks   [........~~          ~ free, then pages that are mapped when no free block fits:
                                        2 MiB a page
    large blocks   [...~~...~~~~        20 MiB a page

Each of the two is one range of addresses that only grows, so free memory at its end is not lost to
a larger block, as that of a segment is. Best fit as in `caching.py`, but the piece at the end
counts as large as the range may get, and every rest of 512 B or more is a block of its own. Rules:
c10/cuda/CUDACachingAllocator.cpp (get_free_block, try_allocate_expandable_block, should_split).
"""

from packgraph.graphs.memory.caching import LARGE_SEGMENT, SMALL_SEGMENT, SMALLEST, CachingPool


class ExpandablePool(CachingPool):
    """One private pool. segments: bytes mapped for large and for small blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.segments = [0, 0]

    def _fitting(self, rounded: int, small: bool) -> int:
        fitting, free = super()._fitting(rounded, small), self._free[small]
        if fitting + 1 < len(free):
            size, segment, offset = free[fitting]
            return fitting + (offset + size == self.segments[segment])
        return fitting

    def _is_cut_off(self, left: int, small: bool) -> bool:
        return left >= SMALLEST

    def _add_memory(self, rounded: int, small: bool) -> None:
        segment, page = int(small), SMALL_SEGMENT if small else LARGE_SEGMENT
        top = self.segments[segment]
        start = top - self._ends.get((segment, top), 0)
        if start < top:
            self._take((top - start, segment, start), small)
        self.segments[segment] = -(-(start + rounded) // page) * page
        self._give((self.segments[segment] - start, segment, start), small)
