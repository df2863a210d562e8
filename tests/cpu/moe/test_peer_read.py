"""Plans and moves between ranks against loops: operations in one process, kernels in Triton's
interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreterkit import inside, needs_triton, outside, run_in_interpreter
from pullkit import draw_experts

from packgraph.moe.peer_read import (
    bytes_for,
    locate,
    naive_plans,
    rows_for,
    weights_start,
)
from packgraph.moe.permute import plan_rows


def same(ours, theirs):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@outside
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2**31),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_every_rank_knows_the_row_of_every_pair(ranks, count, places, tokens, seed, data):
    draw = torch.Generator().manual_seed(seed)
    experts = torch.randint(
        -1, ranks * count, (ranks, tokens, places), generator=draw, dtype=torch.int32
    )
    rows = data.draw(st.integers(1, ranks * tokens * places + 2))
    everyone = experts.flatten(0, 1)
    ordered = plan_rows(everyone, ranks * count, everyone.numel())
    for rank, expected in enumerate(naive_plans(list(experts), ranks * count, rows)):
        assert same(locate(everyone, ordered, ranks, rank, rows), expected)


def test_room_is_for_whatever_comes_and_no_more():
    assert rows_for(40, 1.25, 4) == 56 and rows_for(40, 9.0, 4) == 160 and rows_for(1, 1.0, 2) == 8
    assert weights_start(8, 3, torch.bfloat16) == 48 and bytes_for(8, 3, torch.bfloat16) == 48 + 32
    assert weights_start(8, 5, torch.float32) == 160


@inside
@pytest.mark.parametrize(
    ("ranks", "tokens", "places", "count", "rows"),
    [(1, 3, 2, 4, 8), (4, 300, 2, 64, 500), (3, 7, 8, 9, 60)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["mixed", "padding", "one"])
def test_tables_of_the_plan_equal_the_operations(ranks, tokens, places, count, rows, kind):
    from packgraph.moe.peer_read import locate_by_kernel

    everyone = draw_experts(ranks, tokens, places, count, kind).flatten(0, 1)
    ordered = plan_rows(everyone, count, everyone.numel())
    for rank in range(ranks):
        found = locate_by_kernel(everyone, ordered.row_of_pair, ordered.offsets, ranks, rank, rows)
        assert same(found, locate(everyone, ordered, ranks, rank, rows))


@outside
@needs_triton
def test_in_the_interpreter():
    run_in_interpreter(__file__)
