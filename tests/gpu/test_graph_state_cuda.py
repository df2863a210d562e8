"""Python state and random generators under CUDA graphs: what a dry run refuses, and what replays
advance."""

import warnings

import pytest
import torch
from statekit import One
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device():
    return torch.linspace(-1, 1, 12, device="cuda").reshape(3, 4)


def seeds_by_function(module, x):
    torch.manual_seed(7)
    return module.linear(x)


def seeds_the_default(module, x):
    torch.cuda.default_generators[0].manual_seed(7)
    return module.linear(x)


def seeds_its_own(module, x):
    module.held.manual_seed(5)
    return module.linear(x) * torch.rand(4, device="cuda", generator=module.held)


def draws_on_the_host(module, x):
    return module.linear(x) * torch.rand(4).cuda()


def draws_from_a_stranger(module, x):
    return module.linear(x) * torch.rand(
        4, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )


def counts(module, x):
    module.calls += 1
    return module.linear(x)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (seeds_by_function, "cannot read"),
        (seeds_the_default, "cannot read"),
        (seeds_its_own, "cannot read"),
        (draws_on_the_host, "drawn on the cpu"),
        (draws_from_a_stranger, "cannot read"),
        (counts, "forward changes a One"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_graph_would_freeze_is_refused_and_undone(forward, match):
    module = One(forward, held=torch.Generator("cuda").manual_seed(5), calls=0).cuda()
    before = [torch.get_rng_state(), torch.cuda.get_rng_state(), module.held.get_state()]
    with pytest.raises(CaptureError, match=match):
        graph(module, warmup=0, strict=True)(on_device())
    after = [torch.get_rng_state(), torch.cuda.get_rng_state(), module.held.get_state()]
    assert module.calls == 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    fine = graph(nn.Linear(4, 4).cuda(), warmup=0, strict=True)
    fine(on_device()).square().sum().backward()
    assert fine.stats.replayed == 1


@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")  # the tracer knows no generators
def test_a_generator_that_comes_after_wrapping_is_advanced_as_in_eager():
    def forward(module, x):
        noise = torch.rand(4, device="cuda", generator=module.held[0])
        return nn.functional.dropout(module.linear(x) * noise, 0.5)

    runs = []
    for wrapped in (False, True):
        module = One(forward).cuda()
        model = graph(module, warmup=0) if wrapped else module
        module.held = [torch.Generator("cuda").manual_seed(5)]
        torch.manual_seed(0)
        outputs = []
        for _ in range(4):
            outputs.append(model(on_device()))
            outputs[-1].square().sum().backward()
        runs.append(
            [
                *outputs,
                module.linear.weight.grad,
                module.held[0].get_state(),
                torch.cuda.get_rng_state(),
            ]
        )
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_build_in_evaluation_mode_captures_what_training_calls():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).cuda()
    graphed = graph(module, warmup=0, strict=True).eval()
    graphed.build([(on_device(),)])
    out = graphed.train()(on_device())
    out.square().sum().backward()
    assert not out.any() and graphed.stats.captured == 1


def test_a_graphed_module_inside_another_runs_plainly_while_that_is_captured():
    inner = graph(nn.Linear(4, 4).cuda(), warmup=0)
    graphed = graph(nn.Sequential(nn.Linear(4, 4).cuda(), inner), warmup=0, strict=True)
    for _ in range(3):
        graphed(on_device()).square().sum().backward()
    assert graphed.stats.replayed == 3 and inner.stats.replayed == 0


def test_a_number_in_host_memory_is_refused():
    """A kernel takes the number itself, so a graph would keep it."""
    module = One(lambda m, x: m.linear(x) / m.temperature, temperature=torch.tensor(0.07)).cuda()
    with pytest.raises(CaptureError, match=r"reads module\.temperature, a tensor on the cpu"):
        graph(module, warmup=0, strict=True)(on_device())
    graphed = graph(module, warmup=0)
    with warnings.catch_warnings(action="ignore", category=PackgraphWarning):
        for _ in range(3):
            assert torch.equal(graphed(on_device()), module(on_device()))
            module.temperature.mul_(2)


def fills(module, x):
    hidden = module.linear(x).clone()
    hidden[x > 0] = 0.5
    return hidden.square()


def one_hot(module, x):
    return nn.functional.one_hot((x[:, 0] > 0).long(), 4) * module.linear(x)


@pytest.mark.parametrize("forward", [fills, one_hot], ids=lambda each: each.__name__)
def test_what_only_looks_like_a_wait_replays(forward):
    eager, module = One(forward).cuda(), One(forward).cuda()
    graphed = graph(module, warmup=1, strict=True)
    for number in range(4):
        x = torch.randn(3, 4, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
        one, other = eager(x), graphed(x)
        one.square().sum().backward()
        other.square().sum().backward()
        assert torch.equal(one, other)
        assert torch.equal(eager.linear.weight.grad, module.linear.weight.grad)
    assert graphed.stats.replayed == 3
