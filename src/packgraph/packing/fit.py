"""Best-fit-decreasing: which documents share a pack.

Documents are placed longest first, each into the pack with the least room that still takes it. The
room of a pack is the length of the longest document it may still take, over all capacities at once:
it falls as tokens are added and when the documents of a capacity are used up. Rooms are kept
sorted, so a placement is a binary search: n documents take O(n log n) (inserting into the sorted
list moves memory, at most one entry per distinct room).

Two packs together are always fuller than the largest capacity when no bound on documents or lengths
interferes, since the first document of the later one did not fit in the earlier one: padding stays
below one half, but for one pack. Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from packgraph.packing.capacity import Capacity, CapacitySet


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
        room = pack.room(capacities)
        if room:
            if room not in by_room:
                by_room[room] = []
                insort(rooms, room)
            by_room[room].append(pack)
    for pack in packs:
        pack.members.sort()
    return sorted(packs, key=lambda pack: pack.members[0])
