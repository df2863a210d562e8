"""Rows by expert: the plan's invariants, and moving there and back against loops, outputs and
gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packgraph.graphs.graphed import graph
from packgraph.moe.permute import (
    RowPlan,
    combine_rows,
    gather_pairs,
    gather_rows,
    naive_combine_rows,
    naive_gather_pairs,
    naive_gather_rows,
    naive_plan_rows,
    plan_rows,
)

NAN = float("nan")


@st.composite
def routings(draw):
    """(experts [T, k], number of experts): any mixture of padding, empty experts and repeated
    choices."""
    tokens, places, count = (
        draw(st.integers(1, 9)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 7)),
    )
    lowest, highest = sorted(
        draw(st.tuples(st.integers(-1, count - 1), st.integers(-1, count - 1)))
    )
    numbers = st.lists(
        st.integers(lowest, highest), min_size=tokens * places, max_size=tokens * places
    )
    return torch.tensor(
        draw(numbers), dtype=draw(st.sampled_from([torch.int32, torch.int64]))
    ).view(tokens, places), count


def check_plan(plan: RowPlan, experts: torch.Tensor, count: int, rows: int) -> None:
    """Every invariant of a plan, whatever made it."""
    flat, pairs, taken = experts.reshape(-1), plan.pair_of_row, plan.row_of_pair.reshape(-1)
    live = int((flat >= 0).sum())
    used = min(live, rows)
    assert plan.needed == live and plan.needed.dtype == torch.int64
    assert plan.offsets.tolist() == [
        min(int(((flat >= 0) & (flat <= e)).sum()), rows) for e in range(count)
    ]
    assert pairs.shape == (rows,) and plan.row_of_pair.shape == experts.shape
    assert all(x.dtype == torch.int32 for x in plan[:3])
    assert (pairs[:used] >= 0).all() and (pairs[used:] == -1).all()
    assert (taken[flat < 0] == -1).all() and int((taken >= 0).sum()) == used
    assert torch.equal(
        taken[pairs[:used].long()], torch.arange(used, dtype=torch.int32)
    )  # the maps are inverse
    order = [(int(flat[pair]), int(pair)) for pair in pairs[:used]]
    assert order == sorted(order)  # by expert, within one by token and place


@given(routings(), st.integers(1, 80))
@settings(max_examples=60)
def test_plans_keep_their_invariants_and_equal_the_loops(routing, rows):
    experts, count = routing
    plan = plan_rows(experts, count, rows)
    check_plan(plan, experts, count, rows)
    for ours, theirs in zip(plan, naive_plan_rows(experts, count, rows)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize(("rows", "overflow"), [(5, 0), (4, 1), (1, 4), (12, 0)])
def test_a_budget_that_just_suffices_is_no_overflow(rows, overflow):
    experts = torch.tensor([[2, 0], [0, -1], [2, 1]])
    plan = plan_rows(experts, 3, rows)
    assert max(int(plan.needed) - rows, 0) == overflow
    assert (plan.row_of_pair >= 0).sum() == 5 - overflow
    check_plan(plan, experts, 3, rows)


@pytest.mark.parametrize(
    ("experts", "count", "rows", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), 2, 4, r"int32 or int64 \[T, k\]"),
        (torch.zeros(4, 2), 2, 4, "got torch.float32"),
        (torch.zeros(4, 2).int(), 0, 4, "num_experts=0"),
        (torch.zeros(4, 2).int(), 2, 0, "rows=0"),
    ],
)
def test_what_is_no_routing_is_refused(experts, count, rows, message):
    with pytest.raises(ValueError, match=message):
        plan_rows(experts, count, rows)


MOVES = [
    (gather_rows, naive_gather_rows),
    (combine_rows, naive_combine_rows),
    (gather_pairs, naive_gather_pairs),
]


def inputs_of(
    move, plan: RowPlan, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes in and the gradient that comes back, NaN wherever nothing may be read."""
    tokens, rows, used = plan.row_of_pair.shape[0], plan.pair_of_row.shape[0], int(plan.offsets[-1])
    by_row = torch.randn(rows, width).to(dtype)
    by_row[used:] = NAN
    if move is gather_pairs:
        return torch.randn(plan.row_of_pair.shape).to(dtype), by_row[:, 0]
    by_token = torch.randn(tokens, width).to(dtype)
    return (by_token, by_row) if move is gather_rows else (by_row, by_token)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("move", "naive"), MOVES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize("rows", [5, 40])
def test_moves_equal_the_loops(move, naive, places, rows, dtype):
    experts = torch.randint(-1, 4, (6, places))
    plan = plan_rows(experts, 5, rows)
    x, grad = inputs_of(move, plan, 4, dtype)
    results = []
    for function, incoming in ((move, grad), (naive, grad.nan_to_num(0.0))):
        leaf = x.clone().requires_grad_()
        out = function(leaf, plan)
        out.backward(incoming)
        results.append((out, leaf.grad))
    (ours, ours_grad), (theirs, theirs_grad) = results
    assert torch.equal(ours, theirs) and not ours.isnan().any()
    assert not ours_grad.isnan().any()
    # A gradient of tokens is summed in float32 here and rounded once, by autograd of the loops
    # after every term.
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("move", "naive"), MOVES, ids=lambda x: x.__name__)
def test_gradients_are_right_to_second_order(move, naive):
    plan = plan_rows(torch.tensor([[1, 0], [2, -1], [0, 2]]), 3, 7)
    x = torch.randn(
        (7, 2) if move is combine_rows else (3, 2), dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda x: move(x, plan), x)
    assert torch.autograd.gradgradcheck(lambda x: move(x, plan), x)


def there_and_back(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    plan = plan_rows(experts, 4, experts.numel())
    return combine_rows(gather_rows(x, plan) * gather_pairs(weights, plan)[:, None], plan)


class Mover(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, weights, experts):
        return there_and_back(x * self.scale, weights, experts)


def test_replays_follow_new_routings_bitwise():
    model, graphed = Mover(), graph(Mover(), warmup=1, strict=True)
    for step in range(6):
        experts = torch.randint(-1, 4, (8, 2)) if step != 3 else torch.full((8, 2), -1)
        x, weights, results = torch.randn(8, 3), torch.rand(8, 2), []
        for module in (model, graphed):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            out = module(*leaves, experts)
            out.square().sum().backward()
            results.append(
                [
                    out.detach().clone(),
                    *(leaf.grad.clone() for leaf in leaves),
                    next(module.parameters()).grad.clone(),
                ]
            )
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results)), step
    assert graphed.stats.replayed >= 4


def test_padding_alone_takes_no_row():
    plan = plan_rows(torch.full((4, 2), -1), 3, 8)
    assert plan.needed == 0 and not plan.offsets.any() and (plan.pair_of_row == -1).all()
    assert not combine_rows(torch.full((8, 3), NAN), plan).any()
    assert not gather_rows(torch.full((4, 3), NAN), plan).any()
