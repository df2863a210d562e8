"""Which packs of a step ranks run that wait for each other in every microbatch."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import PlannedPack, pack
from packgraph.train.feed import shares

CAPACITIES = (Capacity(64, 8), Capacity(128, 8))


def planned(capacity, pairs):
    return PlannedPack(capacity, 1, capacity.tokens, capacity.tokens, pairs, list)


def waiting(found):
    """Pairs for which the busiest rank of each round lets the others wait."""
    return sum(
        max(p.num_pairs for p in packs) - min(p.num_pairs for p in packs)
        for packs in zip(*found, strict=True)
    )


@given(
    st.lists(st.tuples(st.sampled_from(CAPACITIES), st.integers(1, 10_000)), min_size=1),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (6, 3)]),
)
def test_each_pack_is_run_once_and_rounds_have_one_capacity(sizes, ranks):
    replicas, together = ranks
    packs = [planned(*size) for size in sizes]
    found = shares(packs, replicas, together)
    ran = [id(p) for share in found for p in share if isinstance(p, PlannedPack)]
    assert sorted(ran) == sorted(map(id, packs))
    for first in range(0, replicas, together):
        for packs_of_round in zip(*found[first : first + together], strict=True):
            assert len({p.capacity for p in packs_of_round}) == 1


@pytest.mark.parametrize("together", [2, 4])
def test_ranks_of_a_round_have_about_as_many_pairs(together):
    draw = random.Random(0)
    packs = [planned(CAPACITIES[0], round(draw.lognormvariate(6, 1))) for _ in range(32 * together)]
    in_order = [packs[rank::together] for rank in range(together)]
    assert waiting(shares(packs, together, together)) < waiting(in_order) / 3


def test_equal_packs_keep_the_order_of_the_step():
    packs = [planned(CAPACITIES[0], 7) for _ in range(4)]
    found = shares(packs, 2, 2)
    assert [list(map(id, share)) for share in found] == [
        [id(packs[0]), id(packs[2])],
        [id(packs[1]), id(packs[3])],
    ]


def test_batches_and_plans_of_them_have_as_many_pairs():
    (batch,) = pack([[1] * 5, [2] * 3], CAPACITIES)
    assert batch.num_pairs == 15 + 6
