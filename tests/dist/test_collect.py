"""Tensors that are spread over ranks come together whole, each element sent once."""

import math

import pytest
import torch
from distkit import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import Holding, Pieces, collect, deliveries, rectangles

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_every_element_is_sent_once_whoever_has_copies(shape, data):
    count = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    ranges = list(zip([0, *cuts], [*cuts, count], strict=True))
    owners = data.draw(st.lists(st.integers(0, len(ranges) - 1), max_size=4))  # of copies
    held = [
        {"a": Holding(shape, torch.float32, tuple(rectangles(start, stop, shape)))}
        for start, stop in [*ranges, *(ranges[owner] for owner in owners)]
    ]
    times = torch.zeros(shape)
    for rank, number in deliveries(held)["a"]:
        corner, sizes = held[rank]["a"].rectangles[number]
        times[tuple(slice(o, o + s) for o, s in zip(corner, sizes, strict=True))] += 1
        assert rank < len(ranges), "the first rank that has a part sends it"
    assert torch.equal(times, torch.ones(shape))


def test_a_gap_and_an_overlap_are_named():
    def parts(*spans):
        return [
            {"weight": Holding((4,), torch.float32, (((start,), (size,)),))}
            for start, size in spans
        ]

    assert deliveries(parts((0, 2), (2, 2)))
    for wrong in (parts((0, 2), (3, 1)), parts((0, 3), (2, 2))):
        with pytest.raises(
            ValueError, match=r"weight \[4\] cannot be put together: the ranks hold [35] of its 4"
        ):
            deliveries(wrong)


def gathered(mesh):
    """A tensor of every kind: a DTensor, a flat range, a copy on both, one that only rank 1 has, a
    scalar."""
    numbers = torch.arange(15.0).view(5, 3)
    start, stop = ((0, 7), (7, 15))[mesh.rank]
    flat = numbers.flatten()[start:stop].bfloat16().clone()
    tensors = {
        "split": distribute_tensor(numbers, mesh["tp"], [Shard(0)]),
        "flat": Pieces.of_flat(flat, start, (5, 3), torch.Size((5, 3)), (0, 0)),
        "copy": numbers + 1,
        "scalar": torch.tensor(3),
    }
    if mesh.rank == 1:
        tensors["second only"] = numbers.t()
    return dict(collect(mesh, tensors))


def test_the_first_rank_gets_all_and_the_others_nothing():
    first, second = run_ranks(gathered, 2, layout=Layout(tp=2))
    numbers = torch.arange(15.0).view(5, 3)
    expected = {
        "split": numbers,
        "flat": numbers.bfloat16(),
        "copy": numbers + 1,
        "scalar": torch.tensor(3),
        "second only": numbers.t(),
    }
    assert first.keys() == expected.keys() and not second
    for name, value in expected.items():
        assert torch.equal(first[name], value) and first[name].dtype == value.dtype, name
