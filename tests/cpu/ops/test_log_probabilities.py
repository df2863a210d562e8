"""`packgraph.logprobs`: one call for own and live models, eager and graphed, with and without
gradients."""

import pytest
import torch
from graphkit import poison_free_slots
from packed_families import build
from torch import nn

import packgraph
from packgraph.integrations.transformers import packed
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.ops.log_probabilities import naive_log_probabilities

CAPACITY = packgraph.Capacity(tokens=16, documents=4)
VOCAB = 29
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
# float32 sums of 29 terms of size one in another order
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def made(kind):
    return DecoderModel(CONFIG, seed=1) if kind == "own" else packed(build("llama"))


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (3,), generator=generator).tolist()
    documents = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return packgraph.pack(documents, [CAPACITY])[0]


def logits_of(model, batch):
    if isinstance(model, DecoderModel):
        return model.logits(batch)
    return model.causal.get_output_embeddings()(model(batch, output="hidden"))


@pytest.mark.parametrize("kind", ["own", "live"])
def test_they_are_those_of_all_logits(kind):
    model, batch = made(kind), batch_of(0)
    expected = naive_log_probabilities(logits_of(model, batch), batch.labels, entropy=True)
    found = packgraph.logprobs(model, batch)
    both = packgraph.logprobs(model, batch, entropy=True)
    assert found.shape == both[0].shape == both[1].shape == (16,) and found.dtype == torch.float32
    for ours, theirs in zip((found, *both), (expected[0], *expected), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert torch.equal(found == 0, batch.labels == -100)
    torch.testing.assert_close(-found.sum() / batch.num_loss_tokens, model(batch), **TOLERANCE)
    ours = torch.autograd.grad((both[0] + 0.3 * both[1]).sum(), [*model.parameters()])
    theirs = torch.autograd.grad((expected[0] + 0.3 * expected[1]).sum(), [*model.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("kind", ["own", "live"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.few(3)
def test_graphs_replay_them_with_and_without_gradients(kind, entropy):
    eager, graphed = made(kind), packgraph.graph(made(kind), capacities=[CAPACITY], warmup=1)
    for seed in range(4):
        batch, found = batch_of(seed), []
        for model in (eager, graphed):
            model.zero_grad()
            poison_free_slots(graphed, 0)
            with torch.no_grad():
                old = packgraph.logprobs(model, batch)
            new = packgraph.logprobs(model, batch, entropy=entropy)
            new, bonus = new if entropy else (new, torch.zeros(()))
            ((new - old - 0.5).exp() * torch.linspace(-1, 1, 16) + bonus).sum().backward()
            found.append([old, new.detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found)), "bit by bit"
        assert torch.equal(found[1][0], found[1][1]) or entropy
    assert dict(graphed.stats.fallbacks) == {"warm-up": 2} and graphed.stats.replayed == 6


def test_hidden_states_are_those_that_the_head_reads():
    model, batch = made("own"), batch_of(0)
    hidden = model(batch, output="hidden")
    torch.testing.assert_close(
        (hidden @ model.head_weight.t())[~batch.padding_mask],
        model.logits(batch)[~batch.padding_mask],
        **TOLERANCE,
    )
    assert not hidden[batch.padding_mask].any()


@pytest.mark.parametrize("kind", ["own", "live"])
def test_what_no_head_knows_is_refused(kind):
    with pytest.raises(ValueError, match="output must be one of loss, hidden, log_prob"):
        made(kind)(batch_of(0), output="logits")


def test_other_modules_are_refused():
    for module in (nn.Linear(2, 2), packgraph.graph(nn.Linear(2, 2))):
        with pytest.raises(TypeError, match=r"output=\.\.\.\), which .* does not take"):
            packgraph.logprobs(module, batch_of(0))
