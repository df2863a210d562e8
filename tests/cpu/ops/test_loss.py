"""Chunked linear cross-entropy against all logits at once: value, all gradients, padding,
repeatability."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from packgraph.ops import loss
from packgraph.ops.loss import (
    linear_cross_entropy,
    naive_linear_cross_entropy,
    token_count,
)

# float32 sums of up to 24 rows in different order
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def inputs(
    rows: int, width: int, vocab: int, ignored: list[int], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[[i for i in ignored if i < rows]] = -100
    return (
        torch.randn(rows, width, generator=generator),
        torch.randn(vocab, width, generator=generator),
        labels,
    )


def gradients(
    function, hidden: Tensor, weight: Tensor, labels: Tensor, factor: float, **options
) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, labels, **options)
    (loss * factor).backward()
    return [loss.detach(), hidden.grad, weight.grad]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 24),
    width=st.integers(1, 8),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 30),
    ignored=st.lists(st.integers(0, 23)),
    seed=st.integers(0, 99),
)
def test_equals_naive_for_value_and_gradients(rows, width, vocab, chunk, ignored, seed):
    hidden, weight, labels = inputs(rows, width, vocab, ignored, seed)
    expected = gradients(naive_linear_cross_entropy, hidden, weight, labels, 0.37)
    hidden[labels == -100] = float("nan")
    actual = gradients(linear_cross_entropy, hidden, weight, labels, 0.37, chunk=chunk)
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert (actual[1][labels == -100] == 0).all()
    assert token_count(labels) == (labels != -100).sum()


@pytest.mark.parametrize("label", [-1, -99, -101, 9, 5000, 2**40])
@pytest.mark.parametrize("function", [naive_linear_cross_entropy, linear_cross_entropy])
def test_a_label_outside_the_vocabulary_makes_nan(function, label):
    hidden, weight, labels = inputs(6, 4, 9, [2])
    legal = gradients(function, hidden, weight, labels, 1.0)
    labels[4] = label
    loss, grad_hidden, grad_weight = gradients(function, hidden, weight, labels, 1.0)
    assert loss.isnan() and grad_hidden[4].isnan().all() and grad_weight.isnan().all()
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(grad_hidden[others], legal[1][others])


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_counts_labels_with_the_largest_logit(softcap):
    """In the same chunks: the loss and gradients keep every bit."""
    hidden, weight, labels = inputs(50, 16, 33, [3, 49])
    labels[::5] = (hidden @ weight.t()).argmax(-1)[::5]
    labels[3] = -100
    options = {"chunk": 16, "scale": 0.5, "softcap": softcap}
    plain = gradients(linear_cross_entropy, hidden, weight, labels, 0.1, **options)
    found = gradients(
        lambda *args, **more: linear_cross_entropy(*args, **more, hits=True)[0],
        *(hidden, weight, labels, 0.1),
        **options,
    )
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    counted = linear_cross_entropy(hidden, weight, labels, **options, hits=True)[1]
    assert counted == ((hidden @ weight.t()).argmax(-1) == labels).sum() >= 10


def test_value_is_the_same_with_autograd_off_and_for_one_wanted_gradient():
    hidden, weight, labels = inputs(10, 4, 7, [2])
    both = gradients(linear_cross_entropy, hidden, weight, labels, 1.0, chunk=4)
    with torch.no_grad():
        assert torch.equal(
            linear_cross_entropy(hidden, weight.clone().requires_grad_(), labels, chunk=4), both[0]
        )
    leaf = weight.clone().requires_grad_()
    linear_cross_entropy(hidden, leaf, labels, chunk=4).backward()
    assert torch.equal(leaf.grad, both[2])
    leaf = hidden.clone().requires_grad_()
    linear_cross_entropy(leaf, weight, labels, chunk=4).backward()
    assert torch.equal(leaf.grad, both[1])


def test_the_incoming_gradient_is_not_rounded_to_bfloat16():
    hidden, weight, labels = (
        value.bfloat16() if value.is_floating_point() else value for value in inputs(32, 8, 20, [])
    )
    factor = (
        1 / 1021
    )  # bfloat16 would make it 1/1024 or so: all gradients wrong in the same direction
    whole = gradients(linear_cross_entropy, hidden, weight, labels, 1.0, chunk=8)
    scaled = gradients(linear_cross_entropy, hidden, weight, labels, factor, chunk=8)
    for one, other in zip(whole[1:], scaled[1:]):
        assert other.dtype == torch.bfloat16
        assert torch.equal(other, (one.float() * torch.tensor(factor)).bfloat16())


def test_autocast_runs_in_its_dtype_and_returns_parameter_gradients():
    hidden, weight, labels = inputs(12, 8, 16, [])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grad_hidden, grad_weight = gradients(
            linear_cross_entropy, hidden, weight, labels, 1.0, chunk=5
        )
    assert loss.dtype == grad_hidden.dtype == grad_weight.dtype == torch.float32
    assert torch.equal(grad_weight, grad_weight.bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "softcap", "itemsize"),
    [(torch.bfloat16, 0.0, 2), (torch.bfloat16, 30.0, None), (torch.float32, 0.0, 4)],
)
def test_chunks_are_large_only_where_gradients_are_written_over_them(
    monkeypatch, dtype, softcap, itemsize
):
    hidden, weight, labels = inputs(4, 8, 16, [])
    asked = []

    def rows(vocabulary, itemsize):
        asked.append(itemsize)
        return 128

    monkeypatch.setattr(loss, "rows_per_chunk", rows)
    monkeypatch.setattr(loss, "writes_over", lambda logits: not asked)  # the kernel is not here
    linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, softcap=softcap)
    assert asked == [itemsize]


def test_a_row_of_no_tokens_has_a_loss_of_zero_and_no_gradient_of_the_head():
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0 and hidden.grad.shape == (0, 4)
    assert weight.grad is None or not weight.grad.any()


def test_a_copy_of_the_head_that_autocast_makes_is_not_kept():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    kept = []

    def pack(value):
        kept.append((tuple(value.shape), value.dtype))
        return value

    labels = torch.tensor([1, 2, 3])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        linear_cross_entropy(hidden, weight, labels)
        plain, kept[:] = list(kept), []
        with torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(hidden, weight, labels)
    assert plain.count(((7, 4), torch.float32)) == 2, "its gradient, and itself"
    assert kept.count(((7, 4), torch.bfloat16)) == 1, "its gradient"


def test_only_ignored_rows_give_exact_zeros():
    hidden, weight, labels = inputs(6, 4, 9, list(range(6)))
    for tensor in gradients(
        linear_cross_entropy, hidden * float("nan"), weight, labels, 1.0, chunk=4
    ):
        assert (tensor == 0).all()


def test_repeats_bitwise():
    hidden, weight, labels = inputs(50, 16, 33, [3])
    runs = [
        gradients(linear_cross_entropy, hidden, weight, labels, 0.1, chunk=16) for _ in range(3)
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))
