"""A sum of parts in their order has the bits of its specification, and one part stays as it was."""

import pytest
import torch

from packgraph.ops.add_sum import add_sum, naive_add_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_sums_have_the_bits_of_the_specification(count, dtype):
    draw = torch.Generator().manual_seed(count)
    for kept in range(count):
        parts = [torch.randn(300, generator=draw).to(dtype) for _ in range(count)]
        total = torch.randn(300, generator=draw).to(dtype)
        expected, before = naive_add_sum(total, parts), parts[kept].clone()
        add_sum(total, parts, kept)
        assert torch.equal(total, expected) and torch.equal(parts[kept], before)
