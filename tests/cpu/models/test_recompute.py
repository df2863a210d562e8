"""Activation recomputation: the bits of training without it, in eager calls and through graphs, with
less memory."""

import itertools
from dataclasses import replace

import pytest
import torch
from offloadkit import CAPACITIES, batches, config

import packgraph
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.config import MambaConfig
from packgraph.models.decoder import DecoderModel
from packgraph.train.runners import sample_batch

MODELS = {
    "dense": config(3),
    "experts": config(3, experts=True),
}


def train(settings, what, *, granularity=None, steps=5, in_flight=2, seed=3, **options):
    """Losses and gradients of every step; forwards of a step come before its backwards."""
    model = called = DecoderModel(settings, seed=1)
    packgraph.recompute(model, what)
    if granularity is not None:
        called = graph(
            model, capacities=CAPACITIES[:1], granularity=granularity, strict=True, warmup=2, **options
        )
    torch.manual_seed(seed)
    facts, packs = [], iter(batches(steps * in_flight, CAPACITIES[:1]))
    for _ in range(steps):
        losses = [called(next(packs), torch.tensor(20)) for _ in range(in_flight)]
        for loss in reversed(losses):
            loss.backward()
        facts += [loss.detach().clone() for loss in losses]
        facts += [parameter.grad.clone() for parameter in model.parameters()]
        facts += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    facts.append(torch.get_rng_state())
    return facts, called


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("what", ["selective", "full", ["attn"], ["mlp", "moe"]])
@pytest.mark.parametrize("name", MODELS)
def test_eager_training_keeps_its_bits(name, what):
    if name == "dense" and "moe" in what:
        what = ["mlp"]
    assert same(train(MODELS[name], "none")[0], train(MODELS[name], what)[0])


@pytest.mark.parametrize("what", ["selective", "full"])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_keep_the_bits(name, granularity, what):
    expected, _ = train(MODELS[name], "none")
    found, graphed = train(MODELS[name], what, granularity=granularity)
    assert same(expected, found)
    assert graphed.stats.replayed >= 6 and not graphed.stats.fallbacks
