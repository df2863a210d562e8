"""Casts to float8: scales, values that are not finite, and the kernels' bits."""

import pytest
import torch

from packgraph.ops.float8.cast import (
    CODES,
    from_float8,
    naive_columns_to_float8,
    naive_rows_to_float8,
)

EDGES = (0.0, -0.0, 448.0, 449.0, 1.75, 1.7501, -256.0, 2.0**-70, 2.0**-130, 3e38)


def rows(dtype, seed=0, size=(9, 33)):
    """Rows of very different sizes, those of `EDGES` among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 2.0 ** torch.randint(
        -40, 40, (size[0], 1), generator=generator
    )
    x[0, : len(EDGES)] = torch.tensor(EDGES)
    x[1], x[2] = 0.0, 2.0**-100
    return x.to(dtype)


def not_finite(x):
    x = x.clone()
    x[3, 5], x[4, 0], x[5, 32] = torch.nan, torch.inf, -torch.inf
    return x


def same(found, expected):
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in ((found[0], expected[0]), (found[1].contiguous(), expected[1].contiguous()))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_scale_is_the_largest_power_of_two_that_overflows_nothing(dtype):
    x = rows(dtype)
    codes, inverse = naive_rows_to_float8(x)
    assert codes.dtype == CODES and inverse.shape == (9, 1)
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-64)
    scaled = largest.double() / inverse.double()
    assert (torch.frexp(inverse)[0] == 0.5).all()
    assert (scaled <= 448).all()
    assert ((2 * scaled > 448) | (largest == 2.0**-64)).all()


def test_what_codes_stand_for_is_within_half_a_unit():
    x = rows(torch.float32)
    found = from_float8(*naive_rows_to_float8(x))
    largest = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-64)
    error = (found - x).abs()
    # Three bits of a normal code, or half of the smallest code of its row.
    assert (error <= torch.maximum(x.abs() / 16, largest * 2.0**-17)).all()
    assert torch.equal(found.bfloat16().float(), found)


def test_a_row_that_is_not_finite_is_so_as_a_whole_and_alone():
    x = rows(torch.float32)
    bad = not_finite(x)
    codes, inverse = naive_rows_to_float8(bad)
    known, expected = naive_rows_to_float8(x)
    wrong = torch.tensor([False] * 3 + [True] * 3 + [False] * 3)
    assert from_float8(codes, inverse)[wrong].isnan().all()
    assert same((codes[~wrong], inverse[~wrong]), (known[~wrong], expected[~wrong]))


def test_rows_that_take_no_part_are_zero_and_zeros_fill_up():
    x, taken = rows(torch.bfloat16), torch.arange(9)[:, None] % 3 > 0
    padded, scales = naive_columns_to_float8(x, taken, 16)
    assert padded.shape == (33, 16) and not padded[:, 9:].float().any()
    zero = torch.where(taken, x, 0.0)
    assert same((padded[:, :9].contiguous(), scales), naive_columns_to_float8(zero))
    assert not torch.equal(scales, naive_columns_to_float8(x)[1])
    x[0] = torch.nan  # takes no part
    assert same((padded, scales), naive_columns_to_float8(x, taken, 16))
