"""Packed causal convolution against its naive twin: outputs, all gradients, isolation of documents,
padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import hand_batch
from ssmkit import NAN, conv_inputs, ids_of, with_gradients

from packgraph.mamba.conv import (
    live_document_ids,
    naive_packed_causal_conv,
    packed_causal_conv,
)
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def compare(ids, dtype=torch.float64, activation=True, **sizes):
    inputs = conv_inputs(len(ids), dtype=dtype, **sizes)
    grad = torch.randn(len(ids), inputs[0].shape[1])
    found = with_gradients(
        lambda *leaves: packed_causal_conv(*leaves, ids, activation), inputs, grad
    )
    wanted = with_gradients(
        lambda *leaves: naive_packed_causal_conv(*leaves, ids, activation), inputs, grad
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=LIMITS[dtype], atol=LIMITS[dtype])


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    padding=st.integers(0, 5),
    taps=st.integers(1, 5),
    bias=st.booleans(),
    activation=st.booleans(),
    first=st.integers(0, 3),
)
def test_equals_naive(lengths, padding, taps, bias, activation, first):
    if sum(lengths) + padding:
        compare(
            ids_of(lengths, padding, first), activation=activation, taps=taps, bias=bias, channels=3
        )


def test_a_changed_document_leaves_the_others():
    ids, changed = ids_of([5, 3, 9], 3), slice(5, 8)
    inputs, grad = conv_inputs(20), torch.randn(20, 6)
    before = with_gradients(lambda *leaves: packed_causal_conv(*leaves, ids), inputs, grad)
    other, other_grad = [inputs[0].clone(), *inputs[1:]], grad.clone()
    other[0][changed] *= -7
    other_grad[changed] += 3
    after = with_gradients(lambda *leaves: packed_causal_conv(*leaves, ids), other, other_grad)
    kept = torch.ones(20, dtype=torch.bool)
    kept[changed] = False
    for old, new in zip(before[:2], after[:2]):
        assert torch.equal(old[kept], new[kept]) and not torch.equal(old[~kept], new[~kept])


def test_what_stands_in_padding_reaches_nothing():
    ids, inputs, grad = ids_of([3, 4], 5), conv_inputs(12), torch.randn(12, 6)
    clean = with_gradients(lambda *leaves: packed_causal_conv(*leaves, ids), inputs, grad)
    inputs[0][7:], grad[7:] = NAN, NAN
    poisoned = with_gradients(lambda *leaves: packed_causal_conv(*leaves, ids), inputs, grad)
    for old, new in zip(clean, poisoned, strict=True):
        assert torch.equal(old, new)
    assert not poisoned[0][7:].any() and not poisoned[1][7:].any()


def test_gradcheck():
    ids = ids_of([2, 1, 5], 1)
    inputs = [x.requires_grad_() for x in conv_inputs(9, channels=2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *leaves: packed_causal_conv(*leaves, ids), inputs)


@pytest.mark.parametrize(
    ("weight", "bias", "ids"),
    [
        ((5, 4), (6,), 9),
        ((6, 1, 4), (6,), 9),
        ((6, 4), (1,), 9),
        ((6, 4), (6,), 8),
        ((6, 0), (6,), 9),
    ],
)
def test_shapes_that_do_not_fit_are_refused(weight, bias, ids):
    with pytest.raises(ValueError, match=r"weight \[C, K\]"):
        packed_causal_conv(torch.zeros(9, 6), torch.zeros(weight), torch.zeros(bias), ids_of([ids]))


def test_document_ids_of_a_batch_mark_padding():
    batch = PackedBatch.build([[1, 2, 3], [4, 5]], Capacity(8, 4))
    wanted = torch.tensor([0, 0, 0, 1, 1, -1, -1, -1], dtype=torch.int32)
    assert torch.equal(live_document_ids(batch), wanted)
    by_hand = hand_batch([[1, 2], [], [3]], 5, 4)
    assert (
        live_document_ids(by_hand).tolist() == [0, 0, 2, -1, -1]
        and live_document_ids(by_hand).dtype == torch.int32
    )


def test_a_document_alone_gives_the_same():
    """Whatever lies before it: a document of a pack is the document."""
    ids = ids_of([5, 2, 7], 2)
    x, weight, bias = conv_inputs(16)
    packed = packed_causal_conv(x, weight, bias, ids)
    for start, stop in ((0, 5), (5, 7), (7, 14)):
        alone = packed_causal_conv(x[start:stop], weight, bias, ids[start:stop])
        torch.testing.assert_close(
            packed[start:stop], alone
        )  # SiLU's last bit depends on the vector's end
    assert not packed[14:].any()
