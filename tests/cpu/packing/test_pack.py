"""Packing lists and streams: every document once and whole, the smallest capacity, little padding,
overlong ones."""

import itertools

import numpy as np
import pytest
import torch

from packgraph.packing.bins import best_fit_decreasing
from packgraph.packing.capacity import Capacity, CapacitySet, read_capacities
from packgraph.packing.pack import PackReport, pack, pack_stream

pytest.importorskip("hypothesis")
from hypothesis import given, strategies

CAPACITIES = strategies.lists(
    strategies.builds(
        lambda tokens, documents, share: Capacity(tokens, documents, max(1, tokens * share // 4)),
        strategies.integers(1, 40),
        strategies.integers(1, 6),
        strategies.integers(1, 4),
    ),
    min_size=1,
    max_size=4,
)


@strategies.composite
def packings(draw):
    """Capacities, and documents that fit in them; token ids say which document they are from."""
    capacities = draw(CAPACITIES)
    longest = CapacitySet(capacities).longest
    lengths = draw(strategies.lists(strategies.integers(1, longest), max_size=40))
    return capacities, [
        [100 * number + place for place in range(length)] for number, length in enumerate(lengths)
    ]


def unpack(batch):
    """The documents of a batch, from its device tensors alone."""
    bounds = batch.cu_seqlens.tolist()
    pieces = [batch.tokens[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
    return [piece for piece in pieces if piece]


def check(batches, documents, capacities):
    packed = [document for batch in batches for document in unpack(batch)]
    assert sorted(packed) == sorted(documents)
    for batch in batches:
        inside = unpack(batch)
        assert batch.lengths == tuple(map(len, inside))
        fitting = [
            capacity
            for capacity in capacities
            if capacity.holds(batch.num_tokens, len(inside), max(batch.lengths))
        ]
        assert batch.capacity == min(fitting)


@given(packings())
def test_every_document_lands_whole_in_exactly_one_pack(packing):
    capacities, documents = packing
    batches = pack(documents, capacities)
    check(batches, documents, capacities)
    firsts = [unpack(batch)[0] for batch in batches]
    assert firsts == sorted(firsts)
    assert all(unpack(batch) == sorted(unpack(batch)) for batch in batches)


@given(packings(), strategies.integers(1, 50))
def test_a_stream_packs_every_document_once_with_a_bounded_window(packing, window):
    capacities, documents = packing
    read = 0

    def reading():
        nonlocal read
        for document in documents:
            read += 1
            yield document

    batches = []
    emitted = 0
    for batch in pack_stream(reading(), capacities, window=window):
        assert read - emitted <= window
        emitted += batch.num_documents
        batches.append(batch)
    check(batches, documents, capacities)
    again = pack(documents, capacities, window=window)
    assert all(torch.equal(one.data, two.data) for one, two in zip(batches, again, strict=True))


@given(strategies.lists(strategies.integers(1, 64), min_size=1, max_size=200))
def test_two_packs_are_together_fuller_than_one_capacity(lengths):
    packs = best_fit_decreasing(lengths, CapacitySet([Capacity(64, 200)]))
    totals = sorted(pack.tokens for pack in packs)
    assert len(totals) < 2 or totals[0] + totals[1] > 64
    assert sum(len(pack.members) for pack in packs) == len(lengths)


def test_padding_of_heavy_tailed_documents_is_small():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 4000).astype(int), 1, 1024)
    documents = [np.zeros(length, dtype=np.int64) for length in lengths]
    for window in (None, 256):
        report = PackReport()
        pack(documents, [Capacity(1024, 64)], window=window, report=report)
        assert report.documents == 4000
        assert report.tokens == lengths.sum()
        assert report.padding_fraction < 0.02


def test_the_longest_waiting_document_is_never_left_behind():
    documents = [[1] * 3] + [[2] * 8] * 50
    batches = list(pack_stream(documents, [Capacity(8, 4)], window=10))
    assert batches[0].lengths == (3,)


def test_a_documents_cap_goes_to_the_next_capacity():
    batches = pack([[1]] * 20, [Capacity(32, 8), Capacity(32, 32)])
    assert [batch.capacity for batch in batches] == [Capacity(32, 32)]


def test_overlong_documents_are_an_error_by_default():
    with pytest.raises(
        ValueError, match=r"document 1 has 9 tokens.*documents of 8; add a.*overlong=\"split\""
    ):
        pack([[1], [1] * 9], [Capacity(8, 2), Capacity(4, 9)])


@pytest.mark.parametrize("window", [None, 3])
def test_overlong_documents_are_split_or_dropped_and_counted(window):
    documents = [list(range(20)), [100, 101]]
    report = PackReport()
    batches = pack(documents, [Capacity(8, 4)], overlong="split", report=report, window=window)
    pieces = sorted(document for batch in batches for document in unpack(batch))
    assert pieces == [list(range(8)), list(range(8, 16)), list(range(16, 20)), [100, 101]]
    assert (report.split_documents, report.dropped_documents, report.documents) == (1, 0, 4)

    report = PackReport()
    batches = pack(documents, [Capacity(8, 4)], overlong="drop", report=report, window=window)
    assert [batch.lengths for batch in batches] == [(2,)]
    assert (report.dropped_documents, report.dropped_tokens, report.packs, report.places) == (
        1,
        20,
        1,
        8,
    )
    assert report.padding_fraction == 0.75


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="overlong must be one of error, split, drop"):
        pack([[1]], [Capacity(8, 4)], overlong="cut")
    with pytest.raises(ValueError, match="window must be at least 1"):
        pack_stream([[1]], [Capacity(8, 4)], window=0)
    with pytest.raises(ValueError, match="at least one Capacity"):
        pack([[1]], [])
    with pytest.raises(TypeError, match=r"packgraph\.Capacity"):
        pack([[1]], [512])
    with pytest.raises(TypeError, match="list of documents"):
        pack("text", [Capacity(8, 4)])


def test_capacities_may_be_one_and_of_any_whole_numbers():
    capacity = Capacity(np.int64(8), np.int32(4))  # type: ignore[arg-type]
    assert capacity == Capacity(8, 4) and {type(capacity.tokens), type(capacity.documents)} == {int}
    assert pack([[1, 2]], capacity)[0].capacity == capacity
    assert read_capacities(capacity) == read_capacities([capacity, capacity]) == (capacity,)
    for wrong in (512, [512], "8x4", None, [(8, 4)]):
        with pytest.raises(TypeError, match=r"packgraph\.Capacity"):
            read_capacities(wrong)
    for number in (4.0, True, "4", 0):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            Capacity(8, number)  # type: ignore[arg-type]


def test_nothing_packs_to_nothing():
    assert pack([], [Capacity(8, 4)]) == []
    assert list(pack_stream(iter([]), [Capacity(8, 4)])) == []


@given(
    strategies.lists(
        strategies.tuples(strategies.integers(1, 12), strategies.integers(1, 5)), max_size=8
    )
)
def test_room_is_the_longest_document_that_may_join(members):
    capacities = CapacitySet([Capacity(20, 3, 8), Capacity(30, 2), Capacity(12, 9)])
    tokens, count = sum(length for length, _ in members), len(members)
    longest = max((length for length, _ in members), default=0)
    fitting = [
        length
        for length in range(1, 31)
        if any(c.holds(tokens + length, count + 1, max(longest, length)) for c in capacities.sorted)
    ]
    assert capacities.room(tokens, count, longest) == max(fitting, default=0)
