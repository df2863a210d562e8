"""Packing lengths alone makes the packs that packing documents makes."""

import pytest

from packgraph.packing.bins import OpenPack, PackingWindow, pack_lengths
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.pack import pack

pytest.importorskip("hypothesis")
from hypothesis import assume, given, strategies

CAPACITIES = strategies.lists(
    strategies.builds(Capacity, strategies.integers(1, 40), strategies.integers(1, 6)),
    min_size=1,
    max_size=4,
)


@given(CAPACITIES, strategies.none() | strategies.integers(1, 12), strategies.data())
def test_lengths_are_packed_as_documents_are(capacities, window, data):
    allowed = CapacitySet(capacities)
    lengths = data.draw(strategies.lists(strategies.integers(1, allowed.longest), max_size=40))
    batches = pack(
        [[number] * length for number, length in enumerate(lengths)], capacities, window=window
    )
    packs = list(pack_lengths(lengths, allowed, window=window))
    assert [batch.lengths for batch in batches] == [
        tuple(lengths[m] for m in pack.members) for pack in packs
    ]
    assert [batch.capacity for batch in batches] == [pack.capacity(allowed) for pack in packs]


def test_nothing_to_take():
    with pytest.raises(IndexError, match="no document waits"):
        PackingWindow(CapacitySet(Capacity(4, 1))).take()


@given(
    CAPACITIES, strategies.integers(0, 40), strategies.integers(0, 6), strategies.integers(0, 40)
)
def test_room_is_that_of_the_roomiest_capacity(capacities, tokens, documents, longest):
    longest = min(longest, tokens)
    naive = [
        length
        for length in range(1, 41)
        if any(
            capacity.holds(tokens + length, documents + 1, max(longest, length))
            for capacity in capacities
        )
    ]
    assert CapacitySet(capacities).room(tokens, documents, longest) == max(naive, default=0)


def naive_packs(lengths, capacities, window):
    """The specification of `PackingWindow`, by scans: the longest waiting opens a pack; then the
    longest that fits, of equal ones the longest waiting, joins it until none does."""
    waiting, coming, packs = {}, list(enumerate(lengths)), []
    while coming or waiting:
        while coming and len(waiting) < window:
            number, length = coming.pop(0)
            waiting[number] = capacities.places(length)
        pack = OpenPack()
        chosen = min(waiting)
        while chosen is not None:
            pack.add(chosen, waiting.pop(chosen))
            room = pack.room(capacities)
            fitting = [(-length, number) for number, length in waiting.items() if length <= room]
            chosen = min(fitting)[1] if fitting else None
        pack.members.sort()
        packs.append(pack)
    return packs


@given(
    CAPACITIES, strategies.integers(1, 20), strategies.sampled_from([1, 2, 4]), strategies.data()
)
def test_packs_of_a_window_are_those_of_scans(capacities, window, multiple, data):
    assume(any(capacity.bound >= multiple for capacity in capacities))
    allowed = CapacitySet(capacities, multiple)
    lengths = data.draw(strategies.lists(strategies.integers(1, allowed.longest), max_size=80))
    assert list(pack_lengths(lengths, allowed, window=window)) == naive_packs(
        lengths, allowed, window
    )


def test_lengths_that_come_together_are_those_that_come_one_by_one():
    together, single = (PackingWindow(CapacitySet(Capacity(40, 5))) for _ in range(2))
    lengths, names = [7, 7, 33, 1, 12, 40, 7], "abcdefg"
    together.extend(lengths, names)
    for length, name in zip(lengths, names):
        single.extend([length], [name])
    assert [*together.items()] == [*names]
    while len(single):
        assert together.take() == single.take()
    assert not len(together)
