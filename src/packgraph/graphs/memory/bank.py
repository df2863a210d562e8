"""How large the pools of a bank of graphs get, from what a capture of each bucket allocates and
frees.

    trial capture of a bucket ─▶ MemoryTrace ─▶ model of the allocator ─▶ bytes of the pools

A pool is as large as its allocator makes it, not as large as the tensors in it: sizes are rounded,
blocks are cut from segments, and what is free lies in pieces. So a trace is replayed through a
model of the allocator itself (`caching.py` and `expandable.py` for CUDA, `first_fit.py` for the
recorder). The buckets of a slot exclude each other: they are replayed one after another, largest
first, into the same model, as they are captured into the same pool.

    slot 0   [what forwards leave]       shared by all slots   [what backwards use while they run]
    slot 1   [what forwards leave]       (one slot alone keeps that in its own pool)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from packgraph.packing.capacity import Capacity


@dataclass(frozen=True)
class Lifetime:
    """One block of memory. nbytes: asked for. birth, death: ticks of its trace, no two alike; None
    = till the end.

    brief: made by a backward, so nobody reads it after the replay.
    """

    nbytes: int
    birth: int
    death: int | None = None
    brief: bool = False


@dataclass(frozen=True)
class MemoryTrace:
    """What graphs of one bucket allocate in one slot. blocks: in the order of their births.
    buffers: bytes that the slot holds outside of pools, for inputs and gradients from eager code.
    """

    blocks: tuple[Lifetime, ...]
    buffers: int = 0

    def kept(self) -> list[Lifetime]:
        """What forwards leave to their backwards."""
        return [block for block in self.blocks if not block.brief]

    def brief(self) -> list[Lifetime]:
        """What backwards use while they run."""
        return [block for block in self.blocks if block.brief]


class PoolModel(Protocol):
    """What an allocator would make of allocations in one pool."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""

    def replay(self, blocks: Sequence[Lifetime]) -> None:
        """Allocate and free as one capture does; all is free again afterwards."""


@dataclass(frozen=True)
class BankMemory:
    """Predicted bytes of a bank. slots: how many; slot: of one slot's pool; shared: of the pool for
    all backwards; buffers: of one slot, outside of pools. seen: whether every bucket was measured,
    so that nothing is by a line.
    """

    slots: int
    slot: int
    shared: int
    buffers: int
    seen: bool

    @property
    def pools(self) -> int:
        """Bytes of all pools."""
        return self.slots * self.slot + self.shared

    @property
    def total(self) -> int:
        """Bytes of all pools and buffers."""
        return self.pools + self.slots * self.buffers


class BankModel:
    """Predicts banks from the traces of some capacities. new_pool: an empty model of a pool."""

    def __init__(
        self, traces: Mapping[Capacity, MemoryTrace], new_pool: Callable[[], PoolModel]
    ) -> None:
        """Raises ValueError without any trace: there is nothing to predict from."""
        if not traces:
            raise ValueError("memory is predicted from measured capacities, and there is none")
        self.traces, self._new_pool = dict(traces), new_pool

    def __call__(self, capacity: Capacity) -> int:
        """Bytes of the pool of a single slot for graphs of `capacity`: what `packing/buckets` asks
        for."""
        return self.predict([capacity], 1).slot

    def predict(
        self, capacities: Iterable[Capacity], slots: int, alone: bool | None = None
    ) -> BankMemory:
        """The bank of `capacities` in `slots` slots. Measured ones are replayed, for others a line
        is drawn in tokens.

        alone: whether the slots keep the memory of backwards in their own pools; by default a
        single slot does. Raises ValueError when there are no capacities or no slots.
        """
        wanted = sorted(set(capacities), reverse=True)
        if not wanted or slots < 1:
            raise ValueError(f"a bank has capacities and slots, not {len(wanted)} and {slots}")
        seen = [self.traces[capacity] for capacity in wanted if capacity in self.traces]
        unseen = [capacity.tokens for capacity in wanted if capacity not in self.traces]
        alone = slots == 1 if alone is None else alone
        kept = self._largest(
            [trace.blocks if alone else trace.kept() for trace in seen],
            unseen,
            lambda trace: trace.blocks if alone else trace.kept(),
        )
        shared = (
            0
            if alone
            else self._largest([trace.brief() for trace in seen], unseen, MemoryTrace.brief)
        )
        by_tokens = [(capacity.tokens, trace.buffers) for capacity, trace in self.traces.items()]
        buffers = max(
            [trace.buffers for trace in seen] + [on_line(by_tokens, tokens) for tokens in unseen]
        )
        return BankMemory(slots, kept, shared, buffers, not unseen)

    def _largest(
        self,
        seen: Sequence[Sequence[Lifetime]],
        unseen: Sequence[int],
        part: Callable[[MemoryTrace], Sequence[Lifetime]],
    ) -> int:
        """Bytes of a pool for the parts `seen`, and for others of the same kind with `unseen`
        tokens."""
        replayed = self._replayed(seen)
        if not unseen:
            return replayed
        points = [
            (capacity.tokens, self._replayed([part(trace)]))
            for capacity, trace in self.traces.items()
        ]
        return max([replayed] + [on_line(points, tokens) for tokens in unseen])

    def _replayed(self, captures: Sequence[Sequence[Lifetime]]) -> int:
        pool = self._new_pool()
        for blocks in captures:
            pool.replay(blocks)
        return pool.nbytes


def on_line(points: Sequence[tuple[int, int]], at: int) -> int:
    """The value at `at` on the broken line through `points` (place, value), which goes on straight
    beyond its ends.

    Of several values at one place the largest counts. A single point is not undercut: values to the
    left of it are the same, to the right they grow in proportion, which is more than a line with a
    constant part would say. Raises ValueError without points.
    """
    highest: dict[int, int] = {}
    for place, value in points:
        highest[place] = max(value, highest.get(place, value))
    places = sorted(highest)
    if not places:
        raise ValueError("a line needs at least one point")
    if at in highest:
        return highest[at]
    if len(places) == 1:
        return max(highest[places[0]], round(highest[places[0]] * at / places[0]))
    right = next((index for index, place in enumerate(places) if place > at), len(places) - 1)
    left, right = places[max(right, 1) - 1], places[max(right, 1)]
    slope = (highest[right] - highest[left]) / (right - left)
    return max(0, round(highest[left] + slope * (at - left)))
