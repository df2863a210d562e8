"""Every family of packgraph.integrations.transformers on CUDA: graphs equal eager bit by bit."""

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import CAPACITY, CASES, build, random_batches

from packgraph.integrations.transformers import packed

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", CASES)
def test_graphs_equal_eager_bit_by_bit(family, dtype):
    model = packed(build(family).to(CUDA, dtype))
    batches = [batch.to(CUDA) for batch in random_batches(5)]
    found = packgraph.verify(model, batches, capacities=[CAPACITY], strict=True, warmup=1)
    assert found and found.replayed == 4, found


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_compiled_layers_equal_eager_bit_by_bit(granularity):
    model = packed(build("qwen3", hidden_size=64, head_dim=32).to(CUDA, torch.bfloat16))
    batches = [batch.to(CUDA) for batch in random_batches(5)]
    found = packgraph.verify(
        model,
        batches,
        capacities=[CAPACITY],
        strict=True,
        warmup=1,
        compile=True,
        granularity=granularity,
    )
    assert found and found.replayed == 4, found


def test_packed_attention_of_an_own_module_is_the_kernel_of_the_device():
    torch.manual_seed(0)
    capacity = packgraph.Capacity(tokens=512, documents=8)
    documents = [list(range(n)) for n in (100, 1, 220, 60)]
    (batch,) = packgraph.pack(documents, [capacity])
    batch = batch.to(CUDA)
    q, k, v = (torch.randn(512, heads, 64, device=CUDA) for heads in (4, 2, 2))
    expected = packgraph.packed_attention(q, k, v, batch, backend="naive")
    found = packgraph.packed_attention(*(x.bfloat16() for x in (q, k, v)), batch)
    # bfloat16 has 8 bits: sums of up to 220 terms of size one with weights that add up to one
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert not found[381:].any()
