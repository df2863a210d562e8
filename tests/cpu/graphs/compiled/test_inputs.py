"""Compiled stages beside eager ones, and inputs of any layout: eager calls show compiled code what
graphs show it."""

import pytest
import torch
from torch import nn

import packgraph
from packgraph.graphs.stages import Stage, run_stages

TRACED = "aot_eager"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Routed(nn.Module):
    """An eager stage that hands one tensor of indices on under two names, as dispatchers do, and
    one that uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [Stage("plan", 0, self.plan), Stage("mlp", 0, self.mix)]

    def plan(self, state):
        order = state["x"][:, 0].argsort()
        return {**state, "plan": {"order": order}, "rows": (order, state["x"])}

    def mix(self, state):
        order, x = state["rows"]
        return {"x": self.linear(x[order] + state["x"][state["plan"]["order"]])}

    def end(self, state):
        return state["x"]

    def forward(self, x):
        return run_stages(self, x)


@pytest.mark.parametrize("warmup", [0, 1])
def test_one_tensor_that_eager_stages_hand_on_twice_is_the_same_to_compiled_ones(warmup):
    """Graphs hold memory for each of its places, for which the code of eager calls was not
    compiled."""
    found = []
    for compiler in (False, TRACED):
        torch.manual_seed(2)
        model = packgraph.graph(
            Routed(), warmup=warmup, strict=True, compile=compiler, scope=["mlp"]
        )
        for call in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call)).requires_grad_()
            out = model(x)
            out.sum().backward()
            found.append((out.detach(), x.grad))
        found.append((model.linear.weight.grad, model.linear.bias.grad))
        assert model.stats.replayed == 4 - warmup
    for eager, compiled in zip(found[:5], found[5:], strict=True):
        for left, right in zip(eager, compiled, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(
    "cut",
    [lambda x: x[:, ::2], lambda x: x[:1, :4].expand(6, 4), lambda x: x[:, :6].T[:, :4]],
    ids=["sliced", "expanded", "transposed"],
)
def test_inputs_may_have_any_layout(cut, warmup):
    """Graphs read dense copies of what has gaps; so does compiled code, in eager calls, too."""
    found = []
    for compiler in (False, TRACED):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        if compiler:
            model = packgraph.graph(model, warmup=warmup, strict=True, compile=compiler)
        for call in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(call)).requires_grad_()
            out = model(cut(x))
            out.sum().backward()
            found += [out.detach(), x.grad]
        found += [parameter.grad for parameter in model.parameters()]
    assert model.stats.replayed == 4 - warmup and not model.stats.recompiles
    for left, right in zip(found[:10], found[10:], strict=True):
        torch.testing.assert_close(left, right)
