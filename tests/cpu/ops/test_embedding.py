"""Rows of an embedding and the gradient of its matrix: torch's own as reference, rows that are no
word, words that occur often, the kernel in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from packgraph.ops.embedding import (
    PADDING_INDEX,
    add_embedding_gradient,
    embedding,
    embedding_gradient,
)

DTYPES = [torch.float32, torch.bfloat16]


def draw(tokens, words, width, dtype, seed=0):
    """Words, half of them word 3; a matrix, a gradient of its rows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(words, (tokens,), generator=generator)
    drawn[::2] = 3 % words
    weight = torch.randn(words, width, generator=generator).to(dtype)
    return drawn, weight, torch.randn(tokens, width, generator=generator).to(dtype)


def exact(grad, words, weight):
    total = torch.zeros(weight.shape, dtype=torch.float64)
    counted = words != PADDING_INDEX
    return total.index_add_(0, words[counted], grad[counted].double())


def assert_near(found, expected, cut=1):
    limit = cut * (4e-3 if found.dtype == torch.bfloat16 else 1e-6)
    assert (found.double() - expected).abs().max() <= limit * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_gradients_are_those_of_torch(dtype):
    words, weight, grad = draw(40, 9, 5, dtype)
    leaf, reference = weight.clone().requires_grad_(), weight.double().requires_grad_()
    found = embedding(words, leaf)
    assert torch.equal(found, F.embedding(words, weight))
    found.backward(grad)
    F.embedding(words, reference).backward(grad.double())
    assert_near(leaf.grad, reference.grad)
    assert not leaf.grad[~torch.isin(torch.arange(9), words)].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_word_add_nothing_whatever_they_hold(dtype):
    words, weight, grad = draw(40, 9, 5, dtype)
    words[5::7] = PADDING_INDEX
    grad[5::7] = torch.nan
    found = embedding_gradient(grad, words, weight)
    assert_near(found, exact(grad, words, weight))
    total = torch.randn(9, 5).to(dtype)
    expected = total + found
    add_embedding_gradient(total, grad, words, weight)
    assert torch.equal(total, expected)


def test_sums_for_a_float32_total_are_not_rounded_to_bfloat16():
    words, weight, grad = draw(40, 9, 5, torch.bfloat16)
    total = torch.zeros(9, 5)
    add_embedding_gradient(total, grad, words, weight)
    assert_near(total, exact(grad, words, weight))
    assert not torch.equal(total, embedding_gradient(grad, words, weight).float())


def test_operations_are_registered_as_torch_wants_them():
    words, weight, grad = draw(8, 4, 3, torch.float32)
    torch.library.opcheck(embedding_gradient, (grad, words, weight))
    torch.library.opcheck(add_embedding_gradient, (weight.clone(), grad, words, weight))
