"""The kernel of sums against its specification, bit by bit."""

import pytest
import torch

from packgraph.ops.add_sum import add_sum, naive_add_sum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 4096, 100_001])
def test_sums_have_the_bits_of_the_specification(count, size, dtype):
    draw = torch.Generator("cuda").manual_seed(size)
    for kept in (0, count - 1):
        total, *parts = torch.randn(
            count + 1, size, generator=draw, device="cuda", dtype=dtype
        ).unbind()
        total = total.clone()
        expected, before = naive_add_sum(total, parts), parts[kept].clone()
        add_sum(total, parts, kept)
        assert torch.equal(total, expected) and torch.equal(parts[kept], before)
