"""The solver against brute force: exact over nested sets, never worse after swaps, never below the
bound."""

import itertools

import pytest

from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.buckets.sets import (
    Grid,
    cost_of,
    grid_of,
    is_nested,
    nested_sets,
    swapped,
    tight_cost,
)

pytest.importorskip("hypothesis")
from hypothesis import given, settings, strategies

COSTS = strategies.builds(
    CostModel,
    microbatch_us=strategies.integers(0, 50),
    token_us=strategies.integers(1, 9),
    document_us=strategies.integers(0, 60),
    tile_us=strategies.integers(0, 60),
)
FILLS = strategies.dictionaries(
    strategies.tuples(strategies.integers(1, 30), strategies.integers(1, 6)),
    strategies.integers(1, 9),
    min_size=1,
    max_size=7,
)
TOP = (32, 7)


def close(one, other):
    return one == pytest.approx(other, rel=1e-9)


def brute_force(fills, grid, cost, most, nested):
    """The cheapest set of at most `most` corners with the largest in it, by trying all."""
    *others, top = map(tuple, grid.corners.tolist())
    return min(
        cost_of([*chosen, top], fills, cost)
        for count in range(min(most - 1, len(others)) + 1)
        for chosen in itertools.combinations(others, count)
        if not nested or is_nested(sorted([*chosen, top]))
    )


def naive_cost(corners, fills, cost):
    total = 0
    for (tokens, documents), rows in fills.items():
        first = next(
            corner for corner in sorted(corners) if tokens <= corner[0] and documents <= corner[1]
        )
        total += rows * cost.shape_us(*first)
    return total


@settings(deadline=None, max_examples=60)
@given(FILLS, COSTS, strategies.integers(1, 3), strategies.sampled_from([1, 4]))
def test_nested_sets_are_the_best_nested_ones(fills, cost, most, multiple):
    grid = grid_of(fills, TOP, multiple)
    found = nested_sets(fills, grid, cost, most)
    assert len(found) == most
    for count, chosen in enumerate(found, start=1):
        assert (
            len(chosen.corners) <= count and is_nested(chosen.corners) and chosen.corners[-1] == TOP
        )
        assert close(chosen.cost_us, naive_cost(chosen.corners, fills, cost))
        assert close(chosen.cost_us, brute_force(fills, grid, cost, count, nested=True))
        assert chosen.cost_us >= tight_cost(fills, cost) * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(FILLS, COSTS, strategies.integers(1, 3))
def test_swaps_only_improve_and_stay_above_the_best(fills, cost, most):
    grid = grid_of(fills, TOP, 1)
    start = nested_sets(fills, grid, cost, most)[-1]
    better = swapped(start.corners, fills, grid, cost)
    assert len(better.corners) <= most and TOP in better.corners
    assert close(better.cost_us, naive_cost(better.corners, fills, cost))
    best = brute_force(fills, grid, cost, most, nested=False)
    assert best * (1 - 1e-9) <= better.cost_us <= start.cost_us * (1 + 1e-9)


def test_a_finer_grid_does_not_help():
    """The grid of numbers that occur holds a best nested set."""
    fills, cost = {(5, 1): 4, (9, 3): 2, (17, 2): 1, (30, 6): 3}, CostModel(tile_us=200.0)
    every = Grid(tuple(range(1, 33)), tuple(range(1, 8)))
    for here, there in zip(
        nested_sets(fills, grid_of(fills, TOP, 1), cost, 4), nested_sets(fills, every, cost, 4)
    ):
        assert close(here.cost_us, there.cost_us)


def test_swaps_find_what_is_not_nested():
    """Few long and many short documents: the best pair of small shapes does not hold one
    another."""
    fills, cost = (
        {(30, 1): 100, (4, 6): 100, (32, 7): 1},
        CostModel(microbatch_us=0, tile_us=0, document_us=40),
    )
    grid = grid_of(fills, TOP, 1)
    start = nested_sets(fills, grid, cost, 3)[-1]
    better = swapped(start.corners, fills, grid, cost)
    assert better.cost_us < start.cost_us and not is_nested(better.corners)
    assert close(better.cost_us, brute_force(fills, grid, cost, 3, nested=False))


def test_the_first_corner_that_holds_counts_even_when_a_later_one_is_cheaper():
    """As the packer chooses: fewest tokens first."""
    cost = CostModel(microbatch_us=0, token_us=1, document_us=10, tile_us=0)
    assert (
        cost_of([(10, 9), (11, 1)], {(8, 1): 1}, cost)
        == cost.shape_us(10, 9)
        > cost.shape_us(11, 1)
    )


def test_a_row_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="row of 9 tokens and 1 documents fits in no corner"):
        nested_sets({(9, 1): 1}, Grid((4, 8), (2,)), CostModel(), 2)
    assert cost_of([(4, 4)], {(9, 1): 1}, CostModel()) == float("inf")


def test_very_many_values_make_a_coarser_grid():
    fills = {(tokens, tokens % 400 + 1): 1 for tokens in range(1, 8193)}
    grid = grid_of(fills, (8192, 400), 8)
    assert (
        len(grid.tokens) <= 65
        and len(grid.documents) <= 25
        and (grid.tokens[-1], grid.documents[-1]) == (8192, 400)
    )
    (*_, found) = nested_sets(fills, grid, CostModel(), 8)
    assert len(found.corners) == 8
