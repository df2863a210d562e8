"""Grouped products, the activation and experts against loops over experts: outputs and all
gradients, NaN in tails."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moekit import Layer, by_module, ends_of, make, naive, poisoned, run, train

from packgraph.graphs.graphed import graph
from packgraph.moe.experts import Experts
from packgraph.ops.grouped_gemm import grouped_problems, naive_grouped_mm
from packgraph.ops.linear import grouped_mm

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ENDS = [[5, 5, 13], [0, 0, 0], [20, 20, 20], [0, 7, 20], [3, 10, 16]]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("widths", [(16, 24), (5, 7)], ids=str)
def test_grouped_product_equals_the_loop(widths, ends, transposed, dtype):
    used, (inner, outer) = ends[-1], widths
    a, grad = torch.randn(20, inner).to(dtype), torch.randn(20, outer).to(dtype)
    b = torch.randn((3, outer, inner) if transposed else (3, inner, outer)).to(dtype)

    def ours(a, b):
        return grouped_mm(a, b.mT if transposed else b, ends_of(ends))

    def naive(a, b):
        return naive_grouped_mm(a, b.mT if transposed else b, ends_of(ends))

    out, of_a, of_b = run(ours, [poisoned(a, used), b], poisoned(grad, used))
    for found, expected in zip((out[:used], of_a[:used], of_b), run(naive, [a, b], grad)):
        torch.testing.assert_close(
            found, expected[: len(found)], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
    assert of_b.is_contiguous()
    empty = [expert for expert, start in enumerate([0, *ends[:-1]]) if start == ends[expert]]
    assert not of_b[empty].any()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 5))
@settings(max_examples=25)
def test_grouped_product_for_any_sizes(sizes, tail):
    ends = torch.tensor(sizes).cumsum(0).int()
    used = int(ends[-1])
    if used + tail == 0:
        return
    a, b, grad = (
        torch.randn(used + tail, 4),
        torch.randn(len(sizes), 4, 8),
        torch.randn(used + tail, 8),
    )
    out, of_a, of_b = run(grouped_mm, [poisoned(a, used), b], poisoned(grad, used), ends)
    expected = run(naive_grouped_mm, [a, b], grad, ends)
    for found, wanted in zip((out[:used], of_a[:used], of_b), expected):
        torch.testing.assert_close(found, wanted[: len(found)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [8, 7])
def test_a_backward_under_autocast_is_as_wide_as_its_forward(width):
    """Widths of 7 fill no 16 bytes, so their products are masked ones."""
    a, b, offsets = (
        torch.randn(10, width),
        torch.randn(2, width, width),
        torch.tensor([4, 10], dtype=torch.int32),
    )
    leaves, grad = [a.requires_grad_(), b.requires_grad_()], torch.randn(10, width)
    plain = torch.autograd.grad(grouped_mm(*leaves, offsets), leaves, grad)
    out = grouped_mm(*leaves, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, leaves, grad)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain))


def test_grouped_product_refuses_what_does_not_fit():
    a, b = torch.randn(4, 8), torch.randn(2, 8, 8)
    with pytest.raises(ValueError, match=r"offsets int32 \[E\], got"):
        grouped_mm(a, b, torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=r"\[4, 8\], \[2, 4, 8\]"):
        grouped_mm(a, b[:, :4], ends_of([1, 4]))
    with pytest.raises(ValueError, match=r"torch.float32 and torch.bfloat16"):
        grouped_mm(a, b.bfloat16(), ends_of([1, 4]))
    cpu = torch.device("cpu")
    assert grouped_problems(cpu, torch.float32, 8, 4) == []
    assert len(grouped_problems(cpu, torch.float64, 3)) == 2


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_experts_equal_the_loop(gated, ends, dtype):
    used = ends[-1]
    values, weights, matrices, down, grad = make(dtype, gated=gated)
    ours = run(
        by_module,
        [poisoned(values, used), poisoned(weights, used), matrices, down],
        poisoned(grad, used),
        ends_of(ends),
        gated,
    )
    high = torch.promote_types(
        dtype, torch.float32
    )  # bfloat16: against exact numbers, not against other roundings
    expected = run(
        naive,
        [x.to(high) for x in (values, weights, matrices, down)],
        grad.to(high),
        ends_of(ends),
        gated,
    )
    for name, found, wanted in zip(
        ("out", "values", "weights", "matrices", "down"), ours, expected
    ):
        live = found if name in ("matrices", "down") else found[:used]
        wanted = wanted[: len(live)]
        assert (live.to(high) - wanted).norm() <= TOLERANCE[dtype] * wanted.norm() + 1e-12, name
    assert not ours[2][used:].any()  # the weights' gradient is 0 where there is no row


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_experts_are_right(gated):
    values, weights, matrices, down, _ = make(
        torch.float64, rows=5, count=2, hidden=3, width=2, gated=gated
    )
    leaves = [x.requires_grad_() for x in (values, weights, matrices, down)]
    assert torch.autograd.gradcheck(lambda *x: by_module(*x, ends_of([2, 5]), gated), leaves)


def test_gradients_of_weights_accumulate_and_frozen_weights_have_none():
    experts = Experts(3, 16, 24)
    values, weights, *_, grad = make(torch.float32)
    for _ in range(2):
        experts(values, weights, ends_of([5, 5, 13])).backward(grad)
    twice = [parameter.grad.clone() for parameter in experts.parameters()]
    experts.zero_grad()
    experts(values, weights, ends_of([5, 5, 13])).backward(grad)
    assert all(
        torch.equal(2 * parameter.grad, double)
        for parameter, double in zip(experts.parameters(), twice)
    )
    assert all(parameter.grad.is_contiguous() for parameter in experts.parameters())
    experts.zero_grad()
    experts.requires_grad_(False)
    experts(values.requires_grad_(), weights, ends_of([5, 5, 13])).backward(grad)
    assert values.grad is not None and all(
        parameter.grad is None for parameter in experts.parameters()
    )


def test_autocast_makes_products_narrow():
    experts = Experts(3, 16, 24)
    values, weights, *_ = make(torch.float32)
    ends = ends_of([5, 5, 20])
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(values, weights, ends)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), experts(values, weights, ends), rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("compile", [False, "aot_eager"], ids=str)
@pytest.mark.few(3)
def test_replays_follow_new_routings_bitwise(compile, activation):
    graphed = graph(Layer(activation=activation), warmup=1, strict=True, compile=compile)
    for step, (eager, replayed) in enumerate(
        zip(train(Layer(activation=activation), 8), train(graphed, 8))
    ):
        for ours, theirs in zip(replayed, eager):
            assert torch.equal(ours, theirs), step
            assert not ours.isnan().any()
    assert graphed.stats.replayed >= 6
