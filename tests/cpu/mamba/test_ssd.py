"""Chunked SSD against its naive twin: outputs, all gradients, isolation of documents, padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssmkit import NAN, ids_of, ssd_inputs, with_gradients

from packgraph.graphs.graphed import graph
from packgraph.mamba.ssd import naive_ssd, ssd

LIMITS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2}
Q = 8


def compare(ids, dtype=torch.float64, chunk=Q, **sizes):
    inputs = ssd_inputs(len(ids), dtype=dtype, **sizes)
    grad = torch.randn(inputs[0].shape)
    found = with_gradients(lambda *leaves: ssd(*leaves, ids, chunk), inputs, grad)
    wanted = with_gradients(lambda *leaves: naive_ssd(*leaves, ids), inputs, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        scale = theirs.abs().max().clamp(min=1).float().item()
        torch.testing.assert_close(ours, theirs, rtol=LIMITS[dtype], atol=LIMITS[dtype] * scale)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, Q - 1, Q, Q + 1, 3 * Q + 5]), max_size=4),
    padding=st.integers(0, 9),
    chunk=st.sampled_from([1, 4, Q, 16]),
    groups=st.sampled_from([1, 2]),
    skip=st.booleans(),
    first=st.integers(0, 3),
)
def test_equals_naive(lengths, padding, chunk, groups, skip, first):
    if sum(lengths) + padding:
        compare(
            ids_of(lengths, padding, first),
            chunk=chunk,
            groups=groups,
            skip=skip,
            heads=2,
            size=2,
            state=3,
        )


def test_long_decays_neither_overflow_nor_vanish():
    """Steps so long that a state is gone after a row: exp of anything above 0 would be inf."""
    ids, inputs = ids_of([30, 9], 1), ssd_inputs(40)
    inputs[1] = inputs[1] * 300
    results = [
        with_gradients(lambda *leaves, f=function: f(*leaves), inputs, torch.ones(40, 4, 3))
        for function in (
            lambda *leaves: ssd(*leaves, ids, Q),
            lambda *leaves: naive_ssd(*leaves, ids),
        )
    ]
    for ours, theirs in zip(*results, strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("changed", [slice(0, 5), slice(5, 8), slice(8, 29)], ids=str)
def test_a_changed_document_leaves_the_others(changed):
    ids = ids_of([5, 3, 21, 2], 3)
    inputs, grad = ssd_inputs(34), torch.randn(34, 4, 3)
    before = with_gradients(lambda *leaves: ssd(*leaves, ids, Q), inputs, grad)
    other, other_grad = [value.clone() for value in inputs], grad.clone()
    for place in (0, 1, 3, 4):
        other[place][changed] *= 1.7
    other_grad[changed] += 3
    after = with_gradients(lambda *leaves: ssd(*leaves, ids, Q), other, other_grad)
    kept = torch.ones(34, dtype=torch.bool)
    kept[changed] = False
    for place in (0, 1, 2, 4, 5):  # y and the gradients of x, dt, b, c
        assert torch.equal(before[place][kept], after[place][kept])
        assert not torch.equal(before[place][~kept], after[place][~kept])


def test_what_stands_in_padding_reaches_nothing():
    ids, inputs, grad = ids_of([0, 11, 6], 9), ssd_inputs(26), torch.randn(26, 4, 3)
    clean = with_gradients(lambda *leaves: ssd(*leaves, ids, Q), inputs, grad)
    for place in (0, 1, 3, 4):
        inputs[place][17:] = NAN
    grad[17:] = NAN
    poisoned = with_gradients(lambda *leaves: ssd(*leaves, ids, Q), inputs, grad)
    for old, new in zip(clean, poisoned, strict=True):
        assert torch.equal(old, new)
    assert not any(poisoned[place][17:].any() for place in (0, 1, 2, 4, 5))


def test_gradcheck():
    ids = ids_of([2, 5, 1], 1)
    inputs = [x.requires_grad_() for x in ssd_inputs(9, 2, 2, 1, 2, torch.float64)]
    assert torch.autograd.gradcheck(lambda *leaves: ssd(*leaves, ids, 4), inputs)


def test_a_graph_replays_other_documents():
    """Ids are device data: one graph, any documents, and nothing that it reads on the host."""

    class Mix(torch.nn.Module):
        def forward(self, x, dt, b, c, ids):
            return ssd(x, dt, -torch.ones(4), b, c, torch.ones(4), ids, Q)

    replayed, eager = graph(Mix(), warmup=1), Mix()
    for lengths, padding in (([20], 4), ([3, 9, 7], 5), ([1, 23], 0), ([], 24), ([8, 8, 8], 0)):
        x, dt, _, b, c, _ = ssd_inputs(24)
        inputs, grad, ids = (x, dt, b, c), torch.randn(24, 4, 3), ids_of(lengths, padding)
        results = [
            with_gradients(lambda *leaves, m=module, i=ids: m(*leaves, i), inputs, grad)
            for module in (replayed, eager)
        ]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("place", "shape"),
    [(0, (9, 4)), (1, (9, 3)), (2, (3,)), (3, (9, 3, 5)), (4, (8, 2, 5)), (5, (1,))],
)
def test_shapes_that_do_not_fit_are_refused(place, shape):
    inputs = ssd_inputs(9)
    inputs[place] = torch.zeros(shape)
    with pytest.raises(ValueError, match="ssd needs x"):
        ssd(*inputs, ids_of([9]), Q)
    with pytest.raises(ValueError, match="chunk=0"):
        ssd(*ssd_inputs(9), ids_of([9]), 0)
