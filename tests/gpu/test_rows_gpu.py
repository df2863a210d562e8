"""Kernels that write some rows or add to what is there, on a GPU: bits of their specifications,
sums that repeat, replays with changing data."""

import pytest
import torch

from packgraph.ops.attention.clear_rows import clear_rows, naive_clear_rows
from packgraph.ops.embedding import PADDING_INDEX, add_embedding_gradient, embedding_gradient
from packgraph.ops.loss import add_scaled_gradient, scaled_gradient

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
WORDS, WIDTH, TOKENS = 5000, 1000, 3000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [0, 1, 777, 1000])
def test_rows_of_padding_become_zero_and_others_keep_their_bits(kept, dtype):
    tensors = [torch.randn(1000, heads, 128, device="cuda").to(dtype) for heads in (16, 8, 8)]
    masks = [torch.arange(1000, device="cuda") >= kept for _ in tensors]
    for x in tensors:
        x[kept:] = torch.nan
    expected = [naive_clear_rows(x, mask) for x, mask in zip(tensors, masks, strict=True)]
    clear_rows(tensors, masks)
    assert all(map(torch.equal, tensors, expected))


def draw(dtype, seed=0):
    """Words of which one fills a third of the row, and rows without one; a gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.randint(WORDS, (TOKENS,), generator=generator, device="cuda")
    words[::3], words[5::7] = 11, PADDING_INDEX
    grad = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda").to(dtype)
    grad[5::7] = torch.nan
    return words, grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_an_embedding_are_summed_by_word(dtype):
    words, grad = draw(dtype)
    weight = torch.randn(WORDS, WIDTH, device="cuda").to(dtype)
    found = embedding_gradient(grad, words, weight)
    counted = words != PADDING_INDEX
    exact = torch.zeros(WORDS, WIDTH, dtype=torch.float64, device="cuda")
    exact.index_add_(0, words[counted], grad[counted].double())
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-5
    assert ((found.double() - exact).abs() <= limit * exact.abs() + limit).all()
    assert torch.equal(found, embedding_gradient(grad, words, weight))
    total = weight.clone()
    add_embedding_gradient(total, grad.t().contiguous().t(), words, weight)
    assert torch.equal(total, weight + found), "whatever strides the gradient has"


def test_replays_sum_the_words_of_their_own_row_and_nothing_waits():
    words, grad = draw(torch.bfloat16)
    total = torch.zeros(WORDS, WIDTH, device="cuda", dtype=torch.bfloat16)
    add_embedding_gradient(total, grad, words, total)
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_embedding_gradient(total, grad, words, total)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(captured, stream=stream):
        add_embedding_gradient(total, grad, words, total)
    expected = total.zero_().clone()
    for seed in (1, 2, 3):
        for static, drawn in zip((words, grad), draw(torch.bfloat16, seed), strict=True):
            static.copy_(drawn)
        captured.replay()
        add_embedding_gradient(expected, grad, words, expected)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scaled_gradient_is_added_with_the_bits_of_two_operations(dtype):
    total, gradient = (torch.randn(1000, 999, device="cuda").to(dtype) for _ in range(2))
    factor = torch.tensor(1 / 3, device="cuda")
    expected = total + scaled_gradient(gradient, factor, total)
    add_scaled_gradient(total, gradient, factor, total)
    assert torch.equal(total, expected)
