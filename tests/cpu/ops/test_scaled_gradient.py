"""A gradient times a factor, returned or added: bits, dtypes, the kernel in Triton's
interpreter."""

import pytest
import torch

from packgraph.ops.loss import add_scaled_gradient, scaled, scaled_gradient

DTYPES = [torch.float32, torch.bfloat16]
FACTOR = torch.tensor(1 / 3)


def draw(dtype, size=(30, 7)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_is_not_rounded_to_the_dtype_of_the_gradient(dtype):
    gradient, total, weight = draw(dtype)
    expected = (gradient.float() * FACTOR).to(dtype)
    assert torch.equal(scaled(gradient, FACTOR), expected)
    assert torch.equal(scaled_gradient(gradient, FACTOR, weight), expected)
    sum_of_both = total + expected
    add_scaled_gradient(total, gradient, FACTOR, weight)
    assert torch.equal(total, sum_of_both)
    assert scaled(None, FACTOR) is None


def test_a_product_for_a_float32_total_is_not_rounded_to_bfloat16():
    gradient, _, weight = draw(torch.bfloat16)
    total = draw(torch.float32)[1]
    expected = total + gradient.float() * FACTOR
    rounded = total + scaled_gradient(gradient, FACTOR, weight)
    add_scaled_gradient(total, gradient, FACTOR, weight)
    assert torch.equal(total, expected) and not torch.equal(total, rounded)


def test_operations_are_registered_as_torch_wants_them():
    gradient, total, weight = draw(torch.float32)
    torch.library.opcheck(scaled_gradient, (gradient, FACTOR, weight))
    torch.library.opcheck(add_scaled_gradient, (total, gradient, FACTOR, weight))
