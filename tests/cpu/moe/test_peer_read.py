"""Plans and moves between ranks against loops: operations in one process, kernels in Triton's
interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreterkit import inside, needs_triton, outside, run_in_interpreter
from pullkit import NAN, Peers, draw_experts

from packgraph.moe.peer_read import (
    bytes_for,
    locate,
    naive_from_experts,
    naive_plans,
    naive_to_experts,
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


@inside
@pytest.mark.parametrize(
    ("ranks", "tokens", "places", "count", "width", "kind", "factor", "dtype"),
    [
        (1, 5, 2, 4, 16, "mixed", 1.0, torch.float32),
        (2, 3, 3, 6, 33, "mixed", 2.0, torch.bfloat16),
        (3, 4, 2, 3, 24, "mixed", 1.0, torch.float32),
        (3, 3, 5, 9, 8, "mixed", 1.0, torch.bfloat16),
        (2, 4, 2, 4, 8, "padding", 1.0, torch.float32),
        (2, 4, 2, 4, 16, "one", 1.0, torch.float32),
    ],
    ids=str,
)
def test_moves_equal_the_loops(
    ranks, tokens, places, count, width, kind, factor, dtype, monkeypatch
):
    """Forward and, since either is the other's backward, gradients; also with less room than is
    needed."""
    from packgraph.moe import peer_read
    from packgraph.moe.peer_read import collect, spread

    monkeypatch.setattr(peer_read, "SPREAD_COLUMNS", 32)
    monkeypatch.setattr(peer_read, "COLLECT_COLUMNS", 16)
    rows = rows_for(tokens * places, factor, ranks)
    experts = draw_experts(ranks, tokens, places, count, kind)
    plans = naive_plans(list(experts), count, rows)
    x = [torch.randn(tokens, width).to(dtype).requires_grad_() for _ in range(ranks)]
    weights = [torch.rand(tokens, places, requires_grad=True) for _ in range(ranks)]
    expected = [naive_to_experts(x, weights, plan, rows) for plan in plans]
    peers = Peers(ranks, rows + 8, width, dtype)
    peers.publish([value.detach() for value in x], [value.detach() for value in weights])
    like = x[0].detach()
    for rank, plan in enumerate(plans):
        found = spread(
            peers.table, plan.row_of_pair, plan.offsets, like, True, rows, rows + 8, rank
        )
        assert same(found, [value.detach() for value in expected[rank]])
    alone, none = spread(
        peers.table, plan.row_of_pair, plan.offsets, like, False, rows, rows + 8, ranks - 1
    )
    assert torch.equal(alone, found[0]) and not none.numel()
    grads = [torch.randn(rows, width).to(dtype) for _ in range(ranks)]
    of_rows = [torch.randn(rows) for _ in range(ranks)]
    sent = [part.float() for pair in zip(grads, of_rows, strict=True) for part in pair]
    got = [part for pair in expected for part in pair]
    loss = sum((part * grad).sum() for part, grad in zip(got, sent, strict=True))
    wanted = torch.autograd.grad(
        loss + sum(0 * leaf.sum() for leaf in (*x, *weights)), [*x, *weights]
    )
    for plan, grad, weight in zip(plans, grads, of_rows, strict=True):
        grad[plan.offsets[-1] :], weight[plan.offsets[-1] :] = NAN, NAN
    peers.publish(grads, of_rows, plans)
    sums = [naive_from_experts(grads, plan) for plan in plans]
    rounding = (
        {"rtol": 1e-2, "atol": 4e-2} if dtype is torch.bfloat16 else {"rtol": 0.0, "atol": 0.0}
    )
    for rank, plan in enumerate(plans):
        found, of_weights = collect(peers.table, plan.place_of_pair, like, True, rows, rows + 8)
        torch.testing.assert_close(
            found, sums[rank], **rounding
        )  # the interpreter cuts off where a GPU rounds
        torch.testing.assert_close(found, wanted[rank], rtol=2e-2, atol=4e-2)
        assert torch.equal(of_weights, wanted[ranks + rank])
    assert torch.equal(
        collect(peers.table, plan.place_of_pair, like, False, rows, rows + 8)[0], found
    )


@outside
@needs_triton
def test_in_the_interpreter():
    run_in_interpreter(__file__)
