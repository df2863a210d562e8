"""Attention over a packed batch for own modules: equal to each document alone, and in graphs."""

import pytest
import torch
from torch import Tensor, nn

import packgraph

CAPACITY = packgraph.Capacity(tokens=24, documents=4)
DOCUMENTS = ([5, 9, 1], [24], [1, 2, 3, 4], [11, 13])


class Attends(nn.Module):
    """Projections around packed attention: two query heads per key head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.qkv = nn.Linear(16, 4 * 8 + 2 * 8 + 2 * 8)
        self.out = nn.Linear(4 * 8, 16)

    def heads(self, hidden: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (-1, 8)) for x in self.qkv(hidden).split([32, 16, 16], dim=-1)]

    def forward(self, batch: packgraph.PackedBatch) -> Tensor:
        hidden = self.embed(batch.tokens)
        mixed = packgraph.packed_attention(*self.heads(hidden), batch)
        return self.out(mixed.flatten(1))


def batches(seed: int) -> list[packgraph.PackedBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        packgraph.PackedBatch.build(
            [torch.randint(0, 40, (n,), generator=generator) for n in lengths], CAPACITY
        )
        for lengths in DOCUMENTS
    ]


def test_packed_attention_equals_every_document_alone():
    torch.manual_seed(0)
    module = Attends()
    for batch in batches(1):
        q, k, v = (x.detach().requires_grad_() for x in module.heads(module.embed(batch.tokens)))
        grad = torch.randn(24, 4, 8)
        out = packgraph.packed_attention(q, k, v, batch)
        out.backward(grad)
        start = 0
        for length in batch.lengths:
            rows = slice(start, start + length)
            alone = [x.detach()[rows].requires_grad_() for x in (q, k, v)]
            expected = nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in alone), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            expected.backward(grad[rows])
            # float32 sums of at most 24 terms of size one, in another order
            torch.testing.assert_close(out[rows], expected, rtol=1e-4, atol=1e-5)
            for whole, one in zip((q, k, v), alone, strict=True):
                torch.testing.assert_close(whole.grad[rows], one.grad, rtol=1e-4, atol=1e-5)
            start += length
        assert not out[start:].any()
        assert not any(x.grad[start:].any() for x in (q, k, v))


def test_a_module_with_packed_attention_trains_through_graphs_bit_by_bit():
    torch.manual_seed(0)
    found = packgraph.verify(
        Attends(),
        [batch for seed in range(2) for batch in batches(seed)],
        loss=lambda out: out.square().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        capacities=[CAPACITY],
    )
    assert found, str(found)


def test_arguments_that_do_not_fit_are_named():
    (batch, *_) = batches(0)
    q = torch.randn(24, 3, 8)
    with pytest.raises(ValueError, match="multiple of k's"):
        packgraph.packed_attention(q, q[:, :2], q[:, :2], batch)
    with pytest.raises(ValueError, match="unknown attention backend"):
        packgraph.packed_attention(q, q, q, batch, backend="fast")
