"""The sum of two parts, added to a total."""

import pytest
import torch

from packgraph.ops.elementwise import add_sum, naive_add_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_the_specification(dtype):
    draw = torch.Generator().manual_seed(0)
    total, one, other = (torch.randn(300, generator=draw).to(dtype) for _ in range(3))
    expected, before = naive_add_sum(total, one, other), (one.clone(), other.clone())
    add_sum(total, one, other)
    assert torch.equal(total, expected)
    assert torch.equal(one, before[0]) and torch.equal(other, before[1])
