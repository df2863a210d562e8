"""Sets of buckets against brute force: the best nearly always, never below the bound."""

import itertools
import random

import pytest

from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.buckets.sets import Grid, best_set, cost_of, grid_of, quantiles, tight_cost

pytest.importorskip("hypothesis")
from hypothesis import given, strategies

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


def brute_force(fills, grid, cost, most):
    """The cheapest set of at most `most` corners with the largest in it, by trying all."""
    *others, top = map(tuple, grid.corners.tolist())
    return min(
        cost_of([*chosen, top], fills, cost)
        for count in range(min(most - 1, len(others)) + 1)
        for chosen in itertools.combinations(others, count)
    )


def naive_cost(corners, fills, cost):
    total = 0
    for (tokens, documents), rows in fills.items():
        first = next(
            corner for corner in sorted(corners) if tokens <= corner[0] and documents <= corner[1]
        )
        total += rows * cost.shape_us(*first)
    return total


@given(FILLS, COSTS, strategies.integers(1, 3), strategies.sampled_from([1, 4]))
def test_a_set_holds_every_row_and_costs_between_the_best_and_the_quantiles(
    fills, cost, most, multiple
):
    grid = grid_of(fills, TOP, multiple)
    start, found = quantiles(fills, grid, most), best_set(fills, grid, cost, most)
    assert len(start) == most and len(found.corners) <= most and found.corners[-1] == TOP
    assert close(found.cost_us, naive_cost(found.corners, fills, cost))
    assert found.cost_us >= brute_force(fills, grid, cost, most) * (1 - 1e-9)
    assert found.cost_us >= tight_cost(fills, cost) * (1 - 1e-9)
    assert found.cost_us <= naive_cost(start, fills, cost) * (1 + 1e-9)


def test_sets_are_the_best_nearly_always():
    draw, ratios = random.Random(0), []
    for _ in range(200):
        fills = {
            (draw.randint(1, 30), draw.randint(1, 6)): draw.randint(1, 9)
            for _ in range(draw.randint(1, 7))
        }
        cost = CostModel(
            microbatch_us=draw.randint(0, 50),
            token_us=draw.randint(1, 9),
            document_us=draw.randint(0, 60),
            tile_us=draw.randint(0, 60),
        )
        grid, most = grid_of(fills, TOP, 1), draw.randint(2, 3)
        found, best = best_set(fills, grid, cost, most), brute_force(fills, grid, cost, most)
        ratios.append(found.cost_us / best)
    assert sum(ratios) / len(ratios) < 1.01
    assert sum(ratio < 1.001 for ratio in ratios) > 0.9 * len(ratios)


def test_a_row_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="row of 9 tokens and 1 documents fits in no corner"):
        best_set({(9, 1): 1}, Grid((4, 8), (2,)), CostModel(), 2)
    assert cost_of([(4, 4)], {(9, 1): 1}, CostModel()) == float("inf")


def test_very_many_values_make_a_coarser_grid():
    fills = {(tokens, tokens % 400 + 1): 1 for tokens in range(1, 8193)}
    grid = grid_of(fills, (8192, 400), 8)
    assert (
        len(grid.tokens) <= 65
        and len(grid.documents) <= 25
        and (grid.tokens[-1], grid.documents[-1]) == (8192, 400)
    )
    assert len(best_set(fills, grid, CostModel(), 8).corners) == 8
