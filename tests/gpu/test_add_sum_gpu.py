"""The kernel of sums against its specification, bit by bit."""

import pytest
import torch

from packgraph.ops.elementwise import add_sum, naive_add_sum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 4096, 100_001])
def test_sums_have_the_bits_of_the_specification(size, dtype):
    draw = torch.Generator("cuda").manual_seed(size)
    total, one, other = (
        torch.randn(size, generator=draw, device="cuda", dtype=dtype) for _ in range(3)
    )
    expected = naive_add_sum(total, one, other)
    add_sum(total, one, other)
    assert torch.equal(total, expected)
