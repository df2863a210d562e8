"""Pages of the stash, counted beforehand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.moe.stash.plan import grown_pages, pages_for


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.sampled_from([16, 64, 128]))
def test_pages_suffice_for_all_records_of_the_balanced_sum(rows, page_rows):
    """However unequal records are: what counts is their sum, and a page of rounding for each."""
    balanced = max(math.ceil(sum(rows) / len(rows)), 1)
    pages = pages_for(balanced, 1, len(rows), 1, 1.0, page_rows)
    assert sum(math.ceil(count / page_rows) for count in rows) <= pages
    assert pages <= sum(rows) / page_rows + 2 * len(rows) + len(rows) / page_rows + 1


def test_illegal_values_are_named_at_once():
    with pytest.raises(ValueError, match=r"tokens is 0.*layers is -1.*factor is 0.5"):
        pages_for(0, 1, -1, 1, 0.5)
    with pytest.raises(ValueError, match="the only record is resident"):
        pages_for(1, 1, 1, 1, resident=True)


def test_growing_leaves_room_and_needs_a_reason():
    assert grown_pages(100, 120) == 132
    with pytest.raises(ValueError, match="no reason to grow"):
        grown_pages(100, 100)
