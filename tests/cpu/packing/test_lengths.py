"""Packing lengths alone makes the packs that packing documents makes."""

import pytest

from packgraph.packing.bins import WaitingLengths, pack_lengths
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.pack import pack

pytest.importorskip("hypothesis")
from hypothesis import given, strategies

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
        WaitingLengths(CapacitySet(Capacity(4, 1))).take()


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
