"""What is asked of dynamic context parallelism: ranks, their token budget, legal group sizes,
places for documents.

W = 8 ranks, L tokens each        a group of c ranks is an aligned block of c consecutive ranks
0 1 2 3 4 5 6 7                   and runs one row of at most c·L tokens:
[      4      ][  2  ][1][1]      one wave
"""

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.cost import ContextCost

PLACES = (16, 64, 256)


def powers_of_two(world: int) -> tuple[int, ...]:
    """The powers of two that divide `world`, ascending."""
    return tuple(1 << power for power in range(world.bit_length()) if world % (1 << power) == 0)


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    """The ground of a plan. Raises ValueError with all reasons when it makes no sense.

    world: ranks W of one pipeline stage and tensor rank (dp x cp). tokens: budget L of one rank per
    microbatch. sizes: legal sizes of groups, divisors of W, of which the smallest must divide all
    (default: the powers of two that divide W). places: how many documents a row may have places
    for, any of them at any size; each (size, places) is a bucket and so a variant of the graphs.
    waves: most microbatches of the step; documents that find no room wait for the next one
    (default: as many microbatches as it takes).
    """

    world: int
    tokens: int
    sizes: tuple[int, ...] = ()
    places: tuple[int, ...] = PLACES
    waves: int | None = None
    cost: ContextCost = field(default_factory=lambda: ContextCost.of(CostModel()))

    def __post_init__(self) -> None:
        errors = [
            f"{name} must be at least {least}, got {value}"
            for name, value, least in (
                ("world", self.world, 1),
                ("tokens", self.tokens, 1),
                ("waves", 1 if self.waves is None else self.waves, 1),
            )
            if value < least
        ]
        sizes = tuple(sorted(set(self.sizes) if self.sizes else powers_of_two(max(self.world, 1))))
        errors += [
            f"sizes: {size} does not divide the {self.world} ranks"
            for size in sizes
            if size < 1 or self.world % size
        ]
        if not errors:
            errors += [
                f"sizes: the smallest, {sizes[0]}, must divide all others, for ranks without "
                "documents run in "
                f"groups of that size, and it does not divide {size}"
                for size in sizes
                if size % sizes[0]
            ]
        if not self.places or min(self.places) < 1:
            errors.append(
                f"places for documents must be whole numbers of at least 1, got {list(self.places)}"
            )
        if errors:
            raise ValueError("dynamic context parallelism: " + "; ".join(errors))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "places", tuple(sorted(set(self.places))))

    @property
    def longest(self) -> int:
        """Tokens of the longest document that fits."""
        return self.sizes[-1] * self.tokens

    def needed(self, length: int) -> int:
        """The smallest legal size that holds a document of `length` tokens."""
        return next(size for size in self.sizes if size * self.tokens >= length)

    def places_for(self, documents: int) -> int:
        """The fewest places that a row of so many documents may have."""
        return self.places[bisect_left(self.places, documents)]

    def bucket(self, size: int, documents: int) -> Capacity:
        """The capacity of the row of a group."""
        return Capacity(size * self.tokens, self.places_for(documents))

    def read(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """`lengths` as plain ints. Raises ValueError for a document that has no tokens or fits no
        group."""
        found = tuple(map(operator.index, lengths))
        for place, length in enumerate(found):
            if length < 1:
                raise ValueError(f"document {place} has {length} tokens: leave empty documents out")
            if length > self.longest:
                raise ValueError(
                    f"document {place} has {length:,} tokens, and the largest group holds "
                    f"{self.longest:,} "
                    f"({self.sizes[-1]} ranks x {self.tokens:,}): cut it, give ranks more tokens, "
                    "or allow larger "
                    f"groups (sizes; the world has {self.world} ranks)"
                )
        return found

    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Every longest choice of sizes that divide one another, ascending: one for powers of two.

        Blocks of such sizes are nested. A rank that runs its large groups before its small ones
        then waits for nobody until the end of the step: whoever shares a group with it has run the
        same groups before.
        """
        return tuple(self._extended((self.sizes[0],)))

    def _extended(self, chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        following = [size for size in self.sizes if size > chain[-1] and size % chain[-1] == 0]
        nearest = [
            size
            for size in following
            if not any(size % other == 0 for other in following if other < size)
        ]
        if not nearest:
            yield chain
        for size in nearest:
            yield from self._extended((*chain, size))
