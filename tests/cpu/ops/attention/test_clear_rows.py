"""Rows of padding set to zero: the kernel in Triton's interpreter and the naive twin, on rows that
hold NaN, strided rows, lengths that differ; rows of documents keep their bits."""

import pytest
import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter

from packgraph.ops.attention.clear_rows import clear_rows, naive_clear_rows

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 1), (16, 2, 8), (37, 3, 100), (70, 4, 128)]


def draw(shape, dtype, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[::3] = torch.nan
    return x


def tails(*lengths, kept):
    return [torch.arange(length) >= min(length, kept) for length in lengths]


def assert_cleared(before, after, masks):
    for x, cleared, mask in zip(before, after, masks, strict=True):
        expected = naive_clear_rows(x, mask)
        assert not cleared[mask].any()
        assert torch.equal(cleared.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kept", [0, 1, 20, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_padding_become_zero(dtype, kept):
    tensors = [draw(shape, dtype) for shape in SHAPES[1:]]
    masks = tails(*(x.shape[0] for x in tensors), kept=kept)
    before = [x.clone() for x in tensors]
    clear_rows(tensors, masks)
    assert_cleared(before, tensors, masks)


@needs_triton
@inside
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kept", [0, 1, 20, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_writes_rows_of_padding_alone(dtype, kept, count):
    from packgraph.ops.attention.clear_rows import clear

    tensors = [draw(shape, dtype) for shape in SHAPES[1 : 1 + count]]
    masks = tails(*(x.shape[0] for x in tensors), kept=kept)
    before = [x.clone() for x in tensors]
    clear(tensors, masks)
    assert_cleared(before, tensors, masks)


@needs_triton
@inside
def test_the_kernel_follows_any_mask_and_leaves_what_lies_between_rows():
    from packgraph.ops.attention.clear_rows import clear

    whole = draw((40, 6, 16), torch.bfloat16)
    part, mask, before = whole[:, 1:3], torch.arange(40) % 5 == 2, whole.clone()
    clear((part, whole[:0]), (mask, mask[:0]))
    assert_cleared([before[:, 1:3]], [part], [mask])
    assert torch.equal(whole[:, :1].nan_to_num(7.0), before[:, :1].nan_to_num(7.0))
    assert torch.equal(whole[:, 3:].nan_to_num(7.0), before[:, 3:].nan_to_num(7.0))


@needs_triton
@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
