"""Modules that the tracer cannot read, taken for static by `trust=True`."""

import time

import pytest
import torch
from autogradkit import assert_same, gradients, sample
from graphkit import poison_free_slots
from statekit import One, Staged, quietly
from torch import nn

import packgraph
from packgraph.graphs.stages import Stage


def by_the_clock(module, x):
    """What the tracer cannot read, and does not change."""
    return module.linear(x) * (time.localtime(0).tm_year - 1960) * module.scale


def pair(forward=by_the_clock, **options):
    made = [One(forward, scale=2.0), One(forward, scale=2.0)]
    for module in made:
        module.inner = nn.Dropout(0.5)
    return made[0], packgraph.graph(made[1], warmup=1, trust=True, **options)


def train(model, number):
    x = sample(number)
    out = model(x)
    out.square().sum().backward()
    return out


def test_a_module_that_cannot_be_read_replays_with_the_bits_of_eager():
    eager, graphed = pair()
    for number in range(5):
        poison_free_slots(graphed, number)
        assert torch.equal(train(eager, number), train(graphed, number))
        assert_same(gradients(eager), gradients(graphed))
    assert graphed.stats.replayed == 4 and graphed.stats.compared == 1 and graphed.stats.trusted
    untold = packgraph.graph(One(by_the_clock, scale=2.0), warmup=0)
    quietly(train, untold, 0)
    assert not untold.stats.trusted and untold.stats.replayed == 0


@pytest.mark.parametrize("scope", [None, ["mlp"]])
def test_stages_are_trusted_too(scope):
    class Read(Staged):
        def stages(self):
            return [
                Stage("attn", 0, self.first),
                Stage("mlp", 1, self.second),
            ]

        def first(self, state):
            return {"x": by_the_clock(self, state["x"])}

        def second(self, state):
            return {"x": self.layers[0](state["x"]) * time.localtime(0).tm_year}

    eager, inner = Read(), Read()
    for module in (eager, inner):
        module.scale = 1.0
    graphed = packgraph.graph(inner, warmup=1, trust=True, strict=True, scope=scope)
    for number in range(4):
        poison_free_slots(graphed, number)
        assert torch.equal(train(eager, number), train(graphed, number))
        assert_same(gradients(eager), gradients(graphed))
    assert graphed.stats.replayed == 3


CHANGES = {
    "a parameter": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.ones(4))),
    "a submodule": lambda m: setattr(m, "linear", nn.Linear(4, 4).requires_grad_()),
    "a frozen parameter": lambda m: m.linear.bias.requires_grad_(False),
    "a training flag": lambda m: m.inner.eval(),
    "memory": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.clone() * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_looked_at_is_captured_again(change):
    eager, graphed = pair(lambda m, x: m.inner(by_the_clock(m, x)))

    def step(number):
        found = []
        for model in (eager, graphed):
            torch.manual_seed(number)
            found.append(quietly(train, model, number))
        assert torch.equal(*found)
        assert_same(gradients(eager), gradients(graphed))

    for number in range(3):
        step(number)
    for model in (eager, graphed.module):
        torch.manual_seed(7)
        change(model)
    for model in (eager, graphed):
        model.zero_grad()
    for number in range(3, 6):
        step(number)
    assert graphed.stats.recaptures.total() == 1 and graphed.stats.replayed == 5


def test_what_is_not_looked_at_stays_and_a_comparison_finds_it():
    eager, graphed = pair(compare_every=2, strict=True)
    for number in range(2):
        train(eager, number), train(graphed, number)
    graphed.module.scale = eager.scale = 3.0
    assert not torch.equal(train(eager, 3), train(graphed, 3))
    with pytest.raises(packgraph.CaptureError, match="something else in a replay"):
        [train(graphed, number) for number in range(4, 8)]


def test_a_leaf_of_somebody_else_is_refused():
    other = torch.ones(4, requires_grad=True)
    module = One(lambda m, x: by_the_clock(m, x) + other, scale=1.0)
    with pytest.raises(packgraph.CaptureError, match="no registered parameter"):
        packgraph.graph(module, warmup=0, trust=True, strict=True)(sample(0))


def test_what_waits_for_the_device_is_refused():
    module = One(lambda m, x: by_the_clock(m, x) * x.sum().item(), scale=1.0)
    with pytest.raises(packgraph.CaptureError, match="waits for the device"):
        packgraph.graph(module, warmup=0, trust=True, strict=True)(sample(0))


def test_trust_and_compiled_stages_exclude_each_other():
    with pytest.raises(ValueError, match="leave out one"):
        packgraph.graph(nn.Linear(2, 2), trust=True, compile=True)
