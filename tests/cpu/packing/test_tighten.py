"""Rows of several sizes: never more places or rows than best-fit-decreasing, every document once,
padding gone."""

import pytest

from packgraph.packing.bins import best_fit, best_fit_decreasing, tightened
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.pack import PackReport, pack

pytest.importorskip("hypothesis")
from hypothesis import example, given, strategies

CAPACITIES = strategies.lists(
    strategies.builds(
        lambda tokens, documents, share: Capacity(tokens, documents, max(1, tokens * share // 4)),
        strategies.integers(1, 40),
        strategies.integers(1, 6),
        strategies.integers(1, 4),
    ),
    min_size=1,
    max_size=5,
)


def places(packs, capacities):
    return sum(found.capacity(capacities).tokens for found in packs)


@given(CAPACITIES, strategies.data())
def test_no_more_places_and_no_more_rows(capacities, data):
    allowed = CapacitySet(capacities)
    lengths = data.draw(strategies.lists(strategies.integers(1, allowed.longest), max_size=40))
    before, after = best_fit_decreasing(lengths, allowed), best_fit(lengths, allowed)
    assert sorted(member for found in after for member in found.members) == list(
        range(len(lengths))
    )
    assert places(after, allowed) <= places(before, allowed) and len(after) <= len(before)
    for found in after:
        inside = [lengths[member] for member in found.members]
        assert (found.tokens, found.longest) == (sum(inside), max(inside))
        assert found.members == sorted(found.members)
    assert [found.members[0] for found in after] == sorted(found.members[0] for found in after)


def test_two_sizes_that_are_just_enough_replace_a_full_row_and_a_rest():
    allowed = CapacitySet([Capacity(60, 9), Capacity(80, 9), Capacity(100, 9)])
    lengths = [
        30,
        20,
        20,
        10,
        20,
        20,
        20,
    ]  # 140 tokens: 100 + 40 would cost 160 places, 80 + 60 cost 140
    before, after = best_fit_decreasing(lengths, allowed), best_fit(lengths, allowed)
    assert places(before, allowed) == 160 and places(after, allowed) == 140
    report = PackReport()
    pack([[0] * length for length in lengths], allowed.sorted, report=report)
    assert report.padding_fraction == 0


@example([5, 5, 5], [Capacity(10, 9)])
@given(
    strategies.lists(strategies.integers(1, 10), max_size=20),
    strategies.just([Capacity(10, 3), Capacity(10, 9)]),
)
def test_rows_of_one_size_stay_as_they_are(lengths, capacities):
    allowed = CapacitySet(capacities)
    packs = best_fit_decreasing(lengths, allowed)
    assert tightened(packs, lengths, allowed) == packs


def test_many_sizes_end_in_time():
    allowed = CapacitySet([Capacity(tokens, 50) for tokens in range(64, 4097, 64)])
    lengths = [17 + 37 * number % 900 for number in range(400)]
    assert places(best_fit(lengths, allowed), allowed) < 1.001 * sum(lengths)
