"""Neighbours never share elements, and no more are taken than they need."""

import itertools
import random

import pytest

from packgraph.parallel.flat_buffers import take_turns


def test_ends_share_what_layers_alternate_in():
    for layers in (1, 3, 32, 33):
        starts, count = take_turns([1000, *[400] * layers, 1000])
        assert starts[0] == starts[-1] == 0 and count == 1400


@pytest.mark.parametrize(
    ("sizes", "count"), [([], 0), ([5], 5), ([5, 5], 10), ([5] * 7, 10), ([9, 2, 9], 11)]
)
def test_as_many_as_two_neighbours_need(sizes, count):
    assert take_turns(sizes)[1] == count


def test_neighbours_never_overlap():
    draw = random.Random(3)
    for _ in range(300):
        sizes = [draw.randrange(1, 9) for _ in range(draw.randrange(1, 9))]
        starts, count = take_turns(sizes)
        places = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        assert all(not {*one} & {*two} for one, two in itertools.pairwise(places))
        assert count == max(place.stop for place in places) <= sum(sizes)
