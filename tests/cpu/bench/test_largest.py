"""The search for the most tokens that run: few trials, never beyond the host, and honest when the
time is up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_measures import HeldBytes, most_tokens, search

from packgraph.bench.comparison import Deadline

LOTS = HeldBytes(0.0, 2.0**60)


@given(most=st.integers(0, 100), good=st.integers(0, 100), guess=st.integers(0, 120))
def test_the_largest_number_that_fits_is_found(most, good, guess):
    asked, good = [], min(good, most)
    assert search(lambda number: asked.append(number) or number <= most, good, guess) == most
    assert len(set(asked)) == len(asked) <= 15 and all(number > good for number in asked)


def test_a_good_guess_takes_two_trials():
    asked = []
    assert search(lambda number: asked.append(number) or number <= 13, 4, 13) == 13
    assert asked == [13, 14]


@pytest.mark.parametrize(("asks", "good"), [(0, 2), (1, 4), (3, 16), (4, 16), (5, 24)])
def test_what_is_known_when_the_time_is_up_is_told(asks, good):
    """4, 8 and 16 fit, 32 does not, 24 fits, 28 does not."""
    asked = []
    assert (
        search(
            lambda number: None if len(asked) == asks else asked.append(number) or number <= 27, 2
        )
        == good
    )


def trials(most, takes, there, known=32, deadline=None):
    asked = []
    found = most_tokens(
        lambda tokens: asked.append(tokens) or tokens <= most,
        32,
        deadline or Deadline(None),
        known,
        takes,
        there,
    )
    return *found, asked


def test_a_search_begins_with_what_should_fit():
    assert trials(1000, HeldBytes(1.0, 0.0), HeldBytes(1040.0, 2.0**60)) == (
        992,
        None,
        [960, 992, 1056, 1024],
    )
    assert trials(1000, HeldBytes(), LOTS)[:2] == (992, None)


def test_a_search_stops_before_the_host_has_no_memory_left():
    gib = 2.0**30
    most, why, asked = trials(10**6, HeldBytes(1.0, gib), HeldBytes(10.0**6, 1000 * gib))
    assert most == 992 and asked == [992]
    assert (
        why
        == "1024 would take 1024 GiB of pinned host memory, more than the 1000 GiB of --host-gib"
    )
    most, why, asked = trials(10**6, HeldBytes(0.0, gib), HeldBytes(0.0, 40 * gib))
    assert (most, asked) == (32, []) and why.startswith("64 would take 64 GiB")
    assert trials(900, HeldBytes(1.0, gib), HeldBytes(10.0**6, 1000 * gib))[:2] == (896, None)


def test_a_search_without_time_tells_what_was_known():
    most, why, asked = trials(10**6, HeldBytes(), LOTS, deadline=Deadline(-1.0))
    assert (most, asked) == (32, []) and why.startswith("not measured")


def test_below_a_guess_that_does_not_fit_the_next_ones_are_tried():
    asked = []
    assert search(lambda number: asked.append(number) or number <= 12, 1, 14) == 12
    assert asked == [14, 13, 11, 12]
