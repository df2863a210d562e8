"""A pipeline of one rank: what an error leaves behind, and chunks that share parameters."""

import pytest
import torch
from torch import nn

import packgraph
from packgraph.graphs.graphed import control, graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links

CAPACITY = packgraph.Capacity(24, 4)
TOKENS = torch.tensor(15)


def model():
    return DecoderModel(
        DecoderConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            tie_embeddings=False,
        ),
        seed=1,
    )


def pipeline(*chunks):
    return Pipeline(chunks, Links([0], {}, None, None), 16, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_after_an_error_finds_all_slots_free(slots):
    graphed, twin = graph(model(), warmup=0, slots=slots), model()
    alone = pipeline(graphed)
    batches = [
        packgraph.PackedBatch.build([[1, 2, 3, 4 + i], [5, 6, 7]], CAPACITY) for i in range(3)
    ]
    alone.step(batches, TOKENS)

    def interrupt(chunk, out):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            alone.step(batches, TOKENS, interrupt)
        assert graphed.slots.in_flight() == 0
    for parameter in graphed.parameters():
        parameter.grad = None
    found, expected = alone.step(batches, TOKENS), torch.zeros(())
    for batch in batches:
        loss = twin(batch, TOKENS)
        loss.backward()
        expected += loss.detach()
    assert torch.equal(found, expected)
    for ours, theirs in zip(graphed.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Wary(DecoderModel):
    """Refuses rows that it can tell from lengths on the host, as a decoder does whose rows are cut
    in zigzag."""

    def begin(self, batch, *more):
        if batch.host.lengths is not None and 13 in batch.host.lengths:
            raise ValueError("unlucky")
        return super().begin(batch, *more)


@pytest.mark.parametrize("whole_steps", [False, True])
def test_microbatches_that_a_chunk_refuses_stop_a_step_before_it_begins(whole_steps):
    """Graphs know no lengths: a direct replay, or one of a whole step, would run them and be
    wrong."""
    torch.manual_seed(0)
    graphed = graph(Wary(model().config, seed=1), warmup=0, slots=1)
    alone = Pipeline(
        [graphed],
        Links([0], {}, None, None),
        16,
        torch.float32,
        torch.device("cpu"),
        whole_steps=whole_steps,
    )
    batches = [packgraph.PackedBatch.build([[1] * length], CAPACITY) for length in (7, 12, 13)]
    for _ in range(3):
        alone.step([batches[0], batches[1]], TOKENS)
    before = [parameter.grad.clone() for parameter in graphed.parameters()]
    with pytest.raises(ValueError, match="unlucky"):
        alone.step([batches[0], batches[2]], TOKENS)
    assert all(
        torch.equal(parameter.grad, kept)
        for parameter, kept in zip(graphed.parameters(), before, strict=True)
    )
    assert (
        graphed.slots.in_flight() == 0 and not alone.step([batches[1], batches[0]], TOKENS).isnan()
    )


def test_chunks_that_share_a_parameter_look_at_gradients_in_every_call():
    first, second, third = (graph(nn.Linear(4, 4), warmup=0) for _ in range(3))
    second.module.bias = first.module.bias
    assert pipeline(first, second, third)._alone == [control(third)]


class Scored(nn.Module):
    """A layer and a loss."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh().mean()


def test_what_two_graphed_modules_add_to_a_shared_gradient_is_never_lost():
    """Why such chunks are left out of frozen blocks: each module has a buffer of its own for the
    shared gradient."""
    lost = []
    for frozen in (False, True):
        layer, x = nn.Linear(4, 4), torch.randn(3, 4)
        modules = [graph(Scored(layer), warmup=0) for _ in range(2)]
        for module in modules:
            module.build([(x,)])
        blocks = [module.frozen() for module in modules] if frozen else []
        for block in blocks:
            block.__enter__()
        for module in modules * 2:
            handle = module.acquire((x,), {})
            handle.forward((x,), {})
            handle.backward()
        for block in blocks:
            block.__exit__(None, None, None)
        found = layer.weight.grad.clone()
        layer.weight.grad = None
        for module in modules * 2:
            module.module(x).backward()
        lost.append(not torch.equal(found, layer.weight.grad))
    assert lost == [False, False]
