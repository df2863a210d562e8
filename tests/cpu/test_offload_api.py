"""packgraph.offload: in a loop of one's own, with no import below the public surface."""
import pytest
import torch
from torch import nn

import packgraph
from packgraph.offloading.marks import nowhere

WIDTH, LAYERS = 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.offload = nn.Linear(WIDTH, WIDTH), nowhere

    def forward(self, x):
        with self.offload("mlp_act"):
            return x + torch.tanh(self.linear(x))


def made():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def train(model, offloading=None, steps=6):
    """Losses and gradients of all steps."""
    torch.manual_seed(1)
    found = {}
    for step in range(steps):
        out = model(torch.randn(32, WIDTH)).square().sum()
        out.backward()
        found[f"loss {step}"] = out.detach().clone()
        for name, parameter in model.named_parameters():
            found[f"{name} {step}"] = parameter.grad.clone()
        model.zero_grad()
        if offloading is not None:
            offloading.end_step()
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("limit", [{}, {"max_overhead": 0.5}, {"max_bytes": 60_000}], ids=str)
def test_what_moves_changes_no_bit(limit):
    expected, graphed = train(made()), packgraph.graph(made(), warmup=2)
    offloading = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1, **limit)
    assert same(expected, train(graphed, offloading))
    assert graphed.stats.replayed == 4 and offloading.trace.bytes > 0
    if limit:
        assert 0 < offloading.plan.moved_bytes <= offloading.trace.bytes
    if "max_bytes" in limit:
        assert offloading.plan.peak_bytes <= limit["max_bytes"] < offloading.trace.kept_peak_bytes


def test_after_close_nothing_moves_and_the_graphs_are_new():
    graphed = packgraph.graph(made(), warmup=1)
    offloading = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1)
    train(graphed, offloading, steps=3)
    held = offloading.trace.bytes
    offloading.close()
    captured = graphed.stats.captured
    assert same(train(made(), steps=3), train(graphed, steps=3))
    assert held > 0 and graphed.stats.captured == captured + 1
    assert all(block.offload is nowhere for block in packgraph.control(graphed).module)


def test_a_budget_that_nothing_meets_is_said_and_calls_run_eagerly():
    graphed = packgraph.graph(made(), warmup=1)
    offloading = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1, max_bytes=10)
    with pytest.warns(packgraph.PackgraphWarning, match=r"no plan of offloading fits in 0\.01 KiB: the least"):
        assert same(train(made()), train(graphed, offloading))
    assert graphed.stats.replayed == 0 and graphed.stats.fallbacks["capture failed"] == 5


@pytest.mark.parametrize(("options", "error", "said"), [
    ({"modules": "mlp_act"}, ValueError, r"such as \['mlp_act'\]"), ({"modules": []}, ValueError, "names of blocks"),
    ({"modules": ["a"], "max_overhead": 0.1, "max_bytes": 1}, ValueError, "not both"),
    ({"modules": ["a"], "max_overhead": -0.1}, ValueError, "max_overhead must be at least 0"),
    ({"modules": ["a"], "max_bytes": -1}, ValueError, "max_bytes must be at least 0"),
    ({"modules": ["a"], "max_overhead": float("nan")}, ValueError, "max_overhead must be at least 0"),
], ids=str)
def test_options_that_make_no_sense(options, error, said):
    with pytest.raises(error, match=said):
        packgraph.offload(packgraph.graph(made()), **options)


def test_only_graphed_modules_with_blocks():
    with pytest.raises(TypeError, match=r"that packgraph\.graph returned"):
        packgraph.offload(made(), modules=["mlp_act"])
    with pytest.raises(ValueError, match="no module with an attribute `offload`"):
        packgraph.offload(packgraph.graph(nn.Linear(2, 2)), modules=["mlp_act"])
