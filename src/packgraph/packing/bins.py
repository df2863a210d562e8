"""Best fit decreasing of documents into packs, over all documents or a window of them.

Documents are placed longest first, each into the pack with the least room that still takes it. The
room of a pack is the length of the longest document it may still take, over all capacities at once:
it falls as tokens are added and when the documents of a capacity are used up. Rooms are kept
sorted, so a placement is a binary search: n documents take O(n log n) (inserting into the sorted
list moves memory, at most one entry per distinct room).

Two packs together are always fuller than the largest capacity when no bound on documents or lengths
interferes, since the first document of the later one did not fit in the earlier one: padding stays
below one half, but for one pack. Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973.

`tightened` packs the emptiest rows again into several capacities at once:

Best-fit-decreasing fills rows of the largest capacity and leaves one partly filled row, whose
padding is that of the next larger capacity: with capacities A > B > C and a rest between C and B,

    A A A rest        places 3A + B
    A A B' C'         the same number of rows, fewer places, if some sizes B' + C' are just enough for A + rest

Sums of two to four sizes lie much closer together than the sizes do. So the emptiest rows are
packed again into every combination of as many sizes that could hold them, smallest sum first, until
one works. Places never grow, and neither does the number of rows, whose fixed cost is unknown here.
The idea is that of variable-sized bin packing (D. K. Friesen and M. A. Langston, SIAM J. Comput.
15, 1986), restricted to the rows where padding is.

`PackingWindow` is the same for a stream:

    lengths ──▶ waiting (sorted by length) ──▶ one pack at a time

The document that has waited longest opens a pack; then always the longest waiting one that still
fits joins it, until none does. So nobody waits for ever, and short documents go where padding would
be. Plans that need to know what the packer will do run it without documents (`pack_lengths`).
"""  # noqa: E501

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Generic, TypeVar

from packgraph.packing.capacity import Capacity, CapacitySet

MOST_ROWS = 4  # rows that are packed again together
MOST_COMBINATIONS = 4096  # of sizes that are looked through
MOST_ATTEMPTS = 64  # at packing the same rows again
NUMBER_BITS = 40  # of the numbers of a stream's documents
NUMBERS = (1 << NUMBER_BITS) - 1
Item = TypeVar("Item")


@dataclass
class OpenPack:
    """A pack being filled: the documents in it (any ids), their tokens and the longest of them.

    Tokens and lengths are places where documents take up multiples of some
    (`CapacitySet.multiple`).
    """

    members: list[int] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0

    def add(self, member: int, length: int) -> None:
        """Put document `member` of `length` tokens in."""
        self.members.append(member)
        self.tokens += length
        self.longest = max(self.longest, length)

    def room(self, capacities: CapacitySet) -> int:
        """Length of the longest document that may still join (0: none)."""
        return capacities.room(self.tokens, len(self.members), self.longest)

    def capacity(self, capacities: CapacitySet) -> Capacity:
        """The smallest capacity that holds the pack."""
        return capacities.smallest(self.tokens, len(self.members), self.longest)


def best_fit_decreasing(lengths: Sequence[int], capacities: CapacitySet) -> list[OpenPack]:
    """Assign documents of `lengths` (each within `capacities.longest`) to packs.

    Documents stand in a pack in their given order, and packs in the order of their first documents.
    """
    packs: list[OpenPack] = []
    by_room: dict[int, list[OpenPack]] = {}
    rooms: list[int] = []
    for member in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[member]
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            pack = by_room[room].pop()
            if not by_room[room]:
                del by_room[room]
                del rooms[place]
        else:
            pack = OpenPack()
            packs.append(pack)
        pack.add(member, length)
        if room := pack.room(capacities):
            if room not in by_room:
                by_room[room] = []
                insort(rooms, room)
            by_room[room].append(pack)
    for pack in packs:
        pack.members.sort()
    return sorted(packs, key=lambda pack: pack.members[0])


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
    # For each number of tokens the last one, which takes most documents.
    sizes = list({capacity.tokens: capacity for capacity in capacities.sorted}.values())
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
            if (again := _fill(members, lengths, choice)) is not None:
                saved = places - sum(pack.capacity(capacities).tokens for pack in again)
                best = others + again
                break
    return best


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


class PackingWindow(Generic[Item]):
    """Documents waiting to be packed, as items that the caller knows them by.

    They are numbered in the order they came. The key of a document is one integer, (length in
    places << NUMBER_BITS) - number: in the order of keys the longest stands last, and of equal
    lengths the one that waits longest. Comparing two integers takes a third of comparing two pairs.
    """

    def __init__(self, capacities: CapacitySet) -> None:
        self._capacities = capacities
        self._items: dict[int, Item] = {}  # by number, as are the keys
        self._keys: dict[int, int] = {}
        self._sorted: list[int] = []
        self._oldest = self._next_number = 0  # none that waits is older

    def __len__(self) -> int:
        return len(self._sorted)

    def items(self) -> Iterator[Item]:
        """Waiting items, longest waiting first: adding them in this order restores the window."""
        return iter(self._items.values())

    def extend(self, lengths: Sequence[int], items: Iterable[Item]) -> None:
        """Let documents of these lengths (within the capacities' longest) wait, in this order."""
        numbers = range(self._next_number, self._next_number + len(lengths))
        multiple, waiting, keys = self._capacities.multiple, self._sorted, self._keys
        for number, length in zip(numbers, lengths, strict=True):
            key = keys[number] = (-(-length // multiple) * multiple << NUMBER_BITS) - number
            insort(waiting, key)
        self._items.update(zip(numbers, items, strict=True))
        self._next_number = numbers.stop

    def take(self) -> tuple[list[Item], OpenPack]:
        """Chooses one pack of what waits, in the order it came; its members are numbers. Raises
        IndexError when none waits."""
        keys, waiting, room = self._keys, self._sorted, self._capacities.room
        if not waiting:
            raise IndexError("no document waits to be packed")
        # The first of a dict is not found at once: it steps over all that were taken before.
        while self._oldest not in keys:
            self._oldest += 1
        place = bisect_left(waiting, keys[self._oldest])
        members: list[int] = []
        tokens = longest = 0
        while place >= 0:
            key = waiting.pop(place)
            number, length = -key & NUMBERS, (key + NUMBERS) >> NUMBER_BITS
            members.append(number)
            del keys[number]
            tokens += length
            if length > longest:
                longest = length
            place = bisect_right(waiting, room(tokens, len(members), longest) << NUMBER_BITS) - 1
        members.sort()
        return list(map(self._items.pop, members)), OpenPack(members, tokens, longest)


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
    waiting = PackingWindow[None](capacities)
    for length in lengths:
        waiting.extend([length], [None])
        if len(waiting) >= window:
            yield waiting.take()[1]
    while len(waiting):
        yield waiting.take()[1]
