"""Packing all documents at once into rows of several sizes.

Best-fit-decreasing fills rows of the largest capacity and leaves one partly filled row, whose
padding is that of the next larger capacity: with capacities A > B > C and a rest between C and B,

    A A A rest        places 3A + B
    A A B' C'         the same number of rows, fewer places, if some sizes B' + C' are just enough for A + rest

Sums of two to four sizes lie much closer together than the sizes do. So the emptiest rows are
packed again into every combination of as many sizes that could hold them, smallest sum first, until
one works. Places never grow, and neither does the number of rows, whose fixed cost is unknown here.
The idea is that of variable-sized bin packing (D. K. Friesen and M. A. Langston, SIAM J. Comput.
15, 1986), restricted to the rows where padding is.
"""  # noqa: E501

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.fit import OpenPack, best_fit_decreasing

MOST_ROWS = 4  # rows that are packed again together
MOST_COMBINATIONS = 4096  # of sizes that are looked through
MOST_ATTEMPTS = 64  # at packing the same rows again


def best_fit(lengths: Sequence[int], capacities: CapacitySet) -> list[OpenPack]:
    """Assign documents of `lengths` (each within `capacities.longest`) to packs with few places in
    all.

    Documents stand in a pack in their given order, and packs in the order of their first documents.
    """
    lengths = [capacities.places(length) for length in lengths]
    packs = tightened(best_fit_decreasing(lengths, capacities), lengths, capacities)
    return sorted(packs, key=lambda pack: pack.members[0])


def tightened(
    packs: Sequence[OpenPack], lengths: Sequence[int], capacities: CapacitySet
) -> list[OpenPack]:
    """`packs`, or as many with fewer places, in any order. lengths: of the documents, by number."""
    sizes = _sizes(capacities)
    if len(sizes) < 2 or len(packs) < 2:
        return list(packs)
    emptiest = sorted(packs, key=lambda pack: (pack.tokens, pack.members[0]))
    best, saved = list(packs), 0
    for count in range(2, min(MOST_ROWS, len(packs)) + 1):
        rows, others = emptiest[:count], emptiest[count:]
        places = sum(pack.capacity(capacities).tokens for pack in rows)
        members = sorted(
            (member for pack in rows for member in pack.members), key=lambda m: (-lengths[m], m)
        )
        tokens = sum(pack.tokens for pack in rows)
        for attempt, choice in enumerate(_combinations(sizes, count, tokens, places - saved)):
            if attempt == MOST_ATTEMPTS:
                break
            again = _fill(members, lengths, choice)
            if again is not None:
                saved = places - sum(pack.capacity(capacities).tokens for pack in again)
                best = others + again
                break
    return best


def _sizes(capacities: CapacitySet) -> list[Capacity]:
    """For each number of tokens the capacity that takes most documents, smallest first."""
    by_tokens: dict[int, Capacity] = {}
    for capacity in capacities.sorted:
        known = by_tokens.get(capacity.tokens)
        if known is None or (capacity.documents, capacity.bound) > (known.documents, known.bound):
            by_tokens[capacity.tokens] = capacity
    return list(by_tokens.values())


def _combinations(
    sizes: Sequence[Capacity], count: int, tokens: int, below: int
) -> Iterator[tuple[Capacity, ...]]:
    """All choices of `count` sizes that have room for `tokens` and fewer than `below` places,
    fewest places first."""
    number = 1
    for step in range(count):
        number = number * (len(sizes) + step) // (step + 1)
    if number > MOST_COMBINATIONS:
        return
    found = []
    for choice in combinations_with_replacement(sizes, count):
        places = sum(size.tokens for size in choice)
        if tokens <= places < below:
            found.append((places, choice))
    for _, choice in sorted(found):
        yield choice


def _fill(
    members: Sequence[int], lengths: Sequence[int], sizes: Sequence[Capacity]
) -> list[OpenPack] | None:
    """One pack for each of `sizes` that together hold all `members` (longest first), or None if
    best fit finds none.

    Every pack has a member, else fewer rows would do; packs that stay empty are left out.
    """
    rooms: list[
        tuple[int, int]
    ] = []  # (length of the longest document that may join, index of the size)
    packs = [OpenPack() for _ in sizes]
    for index, size in enumerate(sizes):
        insort(rooms, (size.bound, index))
    for member in members:
        place = bisect_left(rooms, (lengths[member], -1))
        if place == len(rooms):
            return None
        index = rooms.pop(place)[1]
        pack, size = packs[index], sizes[index]
        pack.add(member, lengths[member])
        if len(pack.members) < size.documents and pack.tokens < size.tokens:
            insort(rooms, (min(size.tokens - pack.tokens, size.bound), index))
    for pack in packs:
        pack.members.sort()
    return [pack for pack in packs if pack.members]
