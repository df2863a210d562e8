"""packgraph.offload: in a loop of one's own, with no import below the public surface."""

import warnings

import pytest
import torch
from torch import nn

import packgraph
from packgraph.offloading.marks import offload_block

WIDTH, LAYERS = 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.offload = nn.Linear(WIDTH, WIDTH), offload_block

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
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


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
    assert all(block.offload is offload_block for block in packgraph.control(graphed).module)


def test_a_budget_that_nothing_meets_is_said_and_calls_run_eagerly():
    graphed = packgraph.graph(made(), warmup=1)
    offloading = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1, max_bytes=10)
    with pytest.warns(
        packgraph.PackgraphWarning, match=r"no plan of offloading fits in 0\.01 KiB: the least"
    ):
        assert same(train(made()), train(graphed, offloading))
    assert graphed.stats.replayed == 0 and graphed.stats.fallbacks["capture failed"] == 5


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"modules": "mlp_act"}, ValueError, r"such as \['mlp_act'\]"),
        ({"modules": []}, ValueError, "names of blocks"),
        ({"modules": ["a"], "max_overhead": 0.1, "max_bytes": 1}, ValueError, "not both"),
        (
            {"modules": ["a"], "max_overhead": -0.1},
            ValueError,
            "max_overhead must be a number of at least 0",
        ),
        (
            {"modules": ["a"], "max_bytes": -1},
            ValueError,
            "max_bytes must be a number of at least 0",
        ),
        (
            {"modules": ["a"], "max_overhead": float("nan")},
            ValueError,
            "max_overhead must be a number of at least 0",
        ),
        (
            {"modules": ["a"], "max_bytes": "1GB"},
            ValueError,
            "max_bytes must be a number of at least 0, not '1GB'",
        ),
        (
            {"modules": ["a"], "min_bytes": None},
            ValueError,
            "min_bytes must be a number of at least 0, not None",
        ),
        (
            {"modules": ["a"], "in_flight": 0},
            ValueError,
            "in_flight must be a number of at least 1, not 0",
        ),
        ({"modules": [1]}, ValueError, "names of blocks"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, error, said):
    with pytest.raises(error, match=said):
        packgraph.offload(packgraph.graph(made()), **options)


@pytest.mark.parametrize("closed", [False, True], ids=["captured before", "closed before"])
def test_a_plan_is_made_whenever_offloading_begins(closed):
    graphed = packgraph.graph(made(), warmup=1)
    if closed:
        first = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1)
    train(graphed, steps=3)
    if closed:
        first.close()
    offloading = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1, max_overhead=0.5)
    assert same(train(made()), train(graphed, offloading))
    assert offloading.plan.moved_bytes > 0 and graphed.stats.fallbacks == {"warm-up": 2}


def test_one_at_a_time_and_close_ends_its_own():
    graphed = packgraph.graph(made(), warmup=1)
    first = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1)
    with pytest.raises(ValueError, match=r"offloads already: call close\(\)"):
        packgraph.offload(graphed, modules=["mlp_act"])
    first.close()
    second = packgraph.offload(graphed, modules=["mlp_act"], min_bytes=1)
    first.close()
    train(graphed, second, steps=3)
    assert second.trace.bytes > 0


def test_a_name_that_no_block_has_is_said_once():
    graphed = packgraph.graph(made(), warmup=1)
    offloading = packgraph.offload(graphed, modules=["mlp_atc"], min_bytes=1)
    with pytest.warns(
        packgraph.PackgraphWarning, match="no block is called mlp_atc; .* are mlp_act"
    ):
        train(graphed, offloading, steps=1)
    with warnings.catch_warnings(action="error", category=packgraph.PackgraphWarning):
        train(graphed, offloading, steps=3)


def test_an_attribute_of_the_users_own_is_left_alone():
    model = made()
    model[1].flags = nn.Linear(2, 2)
    model[1].flags.offload = True
    offloading = packgraph.offload(packgraph.graph(model, warmup=1), modules=["mlp_act"])
    assert model[1].flags.offload is True
    offloading.close()
    assert model[1].flags.offload is True


def test_only_graphed_modules_with_blocks():
    with pytest.raises(
        TypeError, match=r"packgraph\.offload wants the module that packgraph\.graph returned"
    ):
        packgraph.offload(made(), modules=["mlp_act"])
    with pytest.raises(ValueError, match="no module with an attribute `offload`"):
        packgraph.offload(packgraph.graph(nn.Linear(2, 2)), modules=["mlp_act"])
