"""What stands between a graphed module and the module it wraps: layers, state, attributes, hooks,
life and death."""

import copy

import pytest
import torch
from statekit import Staged, X, captured, quietly, train
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph


def test_a_replaced_layer_of_a_staged_model_is_used():
    for when in ("before the first call", "after the capture"):
        module = Staged()
        graphed = graph(module, scope=["attn", "mlp"], warmup=0)
        if when == "after the capture":
            train(graphed, X, 2)
        module.layers[0] = nn.Linear(4, 4)
        assert torch.equal(quietly(graphed, X), module(X))
        assert graphed.stats.fallbacks.total() == 0


def test_functional_call_runs_eagerly_and_keeps_the_graphs():
    graphed = captured(nn.Linear(4, 4), X)
    eager = copy.deepcopy(graphed.module)
    base = {name: torch.ones_like(p, requires_grad=True) for name, p in eager.named_parameters()}
    gradients = []
    for model in (eager, graphed):
        out = torch.func.functional_call(
            model, {name: value * 2 for name, value in base.items()}, X
        )
        gradients.append(torch.autograd.grad(out.sum(), list(base.values())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    train(graphed, X)
    assert dict(graphed.stats.fallbacks) == {"parameters are not leaf parameters": 1}
    assert graphed.stats.captured == 1 and graphed.stats.replayed == 3


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.scale = 1.0

    def forward(self, x):
        return self.norm(x) * self.scale

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_state_of_the_wrapper_is_that_of_the_module():
    module = Stateful()
    graphed = graph(module)
    module.register_state_dict_post_hook(
        lambda m, state, prefix, _: state.update({prefix + "more": 1})
    )
    assert (
        list(graphed.state_dict()) == list(module.state_dict()) and "more" in graphed.state_dict()
    )
    nested, plain = nn.Sequential(graphed), nn.Sequential(module)
    assert list(nested.state_dict()) == list(plain.state_dict())
    state = {**nested.state_dict(), "0._extra_state": {"scale": 4.0}}
    del state["0.more"]
    nested.load_state_dict(state)
    assert module.scale == 4.0
    graphed.set_extra_state({"scale": 2.0})
    assert module.scale == 2.0 and graphed.get_extra_state() == {"scale": 2.0}


def test_attributes_modes_and_functions_reach_the_module():
    module = Stateful()
    graphed = graph(module)
    graphed.scale = 3.0
    graphed.extra = nn.Parameter(torch.ones(1))
    assert module.scale == 3.0 and "extra" in dict(module.named_parameters())
    del graphed.extra
    assert not hasattr(module, "extra")
    module.eval()
    assert not graphed.training
    graphed.train()
    assert module.training and module.norm.training
    seen = []
    graphed.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["BatchNorm1d", "Stateful"]
    graphed.double()
    assert module.norm.weight.dtype == torch.float64


def test_a_removed_hook_lets_graphs_be_used_again():
    graphed = captured(nn.Sequential(nn.Linear(4, 4)), X)
    seen = []
    for register in (
        graphed.module[0].register_forward_hook,
        torch.nn.modules.module.register_module_forward_hook,
    ):
        handle = register(lambda *_: seen.append(1))
        with pytest.warns(PackgraphWarning, match="forward hooks"):
            graphed(X).square().sum().backward()
        handle.remove()
    assert seen and dict(graphed.stats.fallbacks) == {"module hooks": 2}
    replayed = graphed.stats.replayed
    train(graphed, X, 2)
    assert graphed.stats.replayed == replayed + 2 and graphed.stats.captured == 1


def test_a_graphed_module_inside_another_runs_plainly_while_that_is_captured():
    inner = graph(nn.Linear(4, 4), warmup=0)
    outer = nn.Sequential(nn.Linear(4, 4), inner)
    eager = copy.deepcopy(outer)
    graphed = graph(outer, warmup=0, strict=True)
    for model in (eager, graphed):
        train(model, X, 3)
    assert graphed.stats.replayed == 3 and dict(inner.stats.fallbacks) == {
        "inside the capture of another module": 3
    }
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(eager.parameters(), outer.parameters(), strict=True)
    )


@pytest.mark.parametrize("mode", ["evaluation", "no_grad", "inference"])
def test_build_captures_what_training_calls(mode):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0))
    graphed = graph(module, warmup=0, strict=True)
    if mode == "evaluation":
        graphed.eval()
    with torch.set_grad_enabled(mode == "evaluation"), torch.inference_mode(mode == "inference"):
        graphed.build([(X,)])
    assert graphed.training is (mode != "evaluation") and graphed.stats.captured == 1
    graphed.train()
    out = graphed(X)
    out.square().sum().backward()
    assert not out.any() and graphed.stats.captured == 1 and module[0].weight.grad is not None


def test_sparse_gradients_are_refused_in_words():
    with pytest.raises(CaptureError, match="sparse tensor"):
        graph(nn.Embedding(10, 4, sparse=True), warmup=0, strict=True)(torch.tensor([1, 2]))
