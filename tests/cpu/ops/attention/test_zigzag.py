"""Zigzag cuts on the device against their definition in lists; the choice of a kind; packing by
padded lengths."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packgraph.ops.attention.kind import (
    choose_context_kind,
    document_multiple,
    row_problems,
)
from packgraph.ops.attention.zigzag import naive_prefixes, naive_rows, tables_of
from packgraph.packing.bins import pack_lengths
from packgraph.packing.capacity import Capacity, CapacitySet, places
from packgraph.packing.pack import PackReport, pack
from packgraph.train.strategies import sample_batch


@st.composite
def rows(draw):
    """Ranks, lengths that fit, tokens and places for documents."""
    size = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), max_size=8))
    tokens = sum(places(length, 2 * size) for length in lengths) + 2 * size * draw(
        st.integers(0, 3)
    )
    return size, lengths, max(tokens, 2 * size), max(len(lengths) + draw(st.integers(0, 3)), 1)


def boundaries(lengths, documents):
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(ends + [ends[-1]] * (documents - len(lengths)), dtype=torch.int32)


@settings(max_examples=80, deadline=None)
@given(rows())
def test_tables_are_those_of_the_definition(case):
    size, lengths, tokens, documents = case
    cu_seqlens = boundaries(lengths, documents)
    starts = cu_seqlens.tolist()
    everywhere = [
        token for rank in range(size) for token in naive_rows(lengths, tokens, size, rank)
    ]
    for place in range(size):
        own, keys = tables_of(cu_seqlens, tokens, size, place)
        expected = naive_rows(lengths, tokens, size, place)
        assert own.padding.tolist() == [token is None for token in expected]
        assert own.source.tolist() == [
            0 if token is None else starts[token[0]] + token[1] for token in expected
        ]
        assert float(own.excess) == 0.0
        check_keys(keys, everywhere, naive_prefixes(lengths, tokens, size, place))
        check_boundaries(keys, lengths, expected, size, place)


def check_keys(keys, everywhere, expected):
    used = int(keys.cu_keys[-1])
    assert keys.tail.tolist() == [number >= used for number in range(len(expected))]
    assert [everywhere[row] for row in keys.take[:used].tolist()] == expected[:used]
    assert all(token is None for token in expected[used:])
    found = [[number for number in row if number >= 0] for row in keys.places.tolist()]
    back = [
        [number for number, source in enumerate(keys.take[:used].tolist()) if source == row]
        for row in range(len(everywhere))
    ]
    assert found == back, "places are the inverse of take"


def check_boundaries(keys, lengths, expected, size, place):
    """The last token of every part sees exactly the tokens before it, and itself."""
    queries, prefixes = keys.cu_queries.tolist(), keys.cu_keys.tolist()
    assert (
        len(queries) == len(prefixes)
        and queries == sorted(queries)
        and prefixes == sorted(prefixes)
    )
    for number, length in enumerate(lengths):
        for part, half in ((place, 0), (2 * size - 1 - place, 1)):
            start, stop = queries[2 * number + half : 2 * number + half + 2]
            width = places(length, 2 * size) // (2 * size)
            assert stop - start == width
            assert (
                prefixes[2 * number + half + 1] - prefixes[2 * number + half] == (part + 1) * width
            )
            for row in range(start, stop):
                assert expected[row] in (None, (number, part * width + row - start))


def test_documents_that_do_not_fit_are_told_on_the_device_and_stay_inside_all_buffers():
    own, keys = tables_of(boundaries([1] * 9, 9), 16, 2, 1)
    assert own.excess.isnan()
    assert int(own.source.min()) >= 0 and int(own.source.max()) < 16
    assert int(keys.cu_queries.max()) <= 8 and int(keys.cu_keys.max()) <= 20
    assert int(keys.take.max()) < 16 and int(keys.places.max()) < 20


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="18 tokens cannot be cut into 4 equal parts"):
        tables_of(boundaries([3], 1), 18, 2, 0)
    with pytest.raises(ValueError, match="15 places do not fit in 7"):
        naive_prefixes([9], 6, 2, 0)
    assert row_problems([1] * 5, 16, "zigzag", 2) == [
        "its documents take up 20 places, each a multiple of 4 with zigzag over 2 ranks, but the "
        "row has 16: from "
        "document 4 (1 tokens) on they do not fit; pack with multiple=4"
    ]
    assert "cannot be spread evenly over 3" in row_problems(None, 16, "ulysses", 3)[0]
    assert "cut into the 8 parts" in row_problems(None, 12, "zigzag", 4)[0]
    assert not row_problems([1] * 5, 16, "ulysses", 2) and not row_problems(
        [1] * 4, 16, "zigzag", 2
    )
    assert not row_problems(None, 16, "zigzag", 2)


def test_zigzag_is_for_more_ranks_than_heads_can_be_shared_by():
    assert choose_context_kind(4, 8).kind == "ulysses"
    assert choose_context_kind(4, 6) == ("zigzag", "4 ranks do not divide 6 heads")
    assert choose_context_kind(16, 8).kind == "zigzag"
    assert choose_context_kind(2, 8, "zigzag") == ("zigzag", "asked for")
    with pytest.raises(
        ValueError, match=r"number \(6\) must be a multiple of the ranks \(4\); use zigzag"
    ):
        choose_context_kind(4, 6, "ulysses")
    assert [
        document_multiple(kind, ranks)
        for kind, ranks in (("zigzag", 4), ("zigzag", 1), ("ulysses", 4))
    ] == [8, 1, 1]
    assert [places(length, 8) for length in (1, 8, 9)] == [8, 8, 16]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=30),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([None, 4]),
)
def test_packs_count_documents_by_the_places_they_take_up(lengths, ranks, window):
    capacities, report = [Capacity(32, 4), Capacity(64, 8)], PackReport()
    documents = [[1] * length for length in lengths]
    packs = pack(documents, capacities, window=window, report=report, multiple=2 * ranks)
    assert sorted(length for batch in packs for length in batch.lengths) == sorted(lengths)
    assert all(
        sum(places(length, 2 * ranks) for length in batch.lengths) <= batch.capacity.tokens
        for batch in packs
    )
    assert (report.tokens, report.places) == (
        sum(lengths),
        sum(batch.capacity.tokens for batch in packs),
    )
    planned = list(pack_lengths(lengths, CapacitySet(capacities, 2 * ranks), window=window))
    assert [len(found.members) for found in planned] == [batch.num_documents for batch in packs], (
        "plans pack alike"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_samples_for_captures_fit_into_every_row_that_can_be_cut(ranks):
    """Halves of 36 tokens take up 40 places with two ranks: every capture failed, and the run went
    on eagerly."""
    for tokens in range(2 * ranks, 24 * ranks, 2 * ranks):
        for capacity in (Capacity(tokens, 4), Capacity(tokens, 1), Capacity(tokens, 4, 2 * ranks)):
            assert not row_problems(sample_batch(capacity).lengths, tokens, "zigzag", ranks), (
                capacity
            )
