"""Gradients of another dtype than the parameters' (`torch.Tensor.grad_dtype`): graphs add to them
as autograd does."""

import contextlib
import itertools

import pytest
import torch
from graphkit import Stages
from torch import nn
from tracekit import differences

import packgraph
from packgraph.graphs.compiled import products
from packgraph.graphs.gradients import adding_together
from packgraph.graphs.graphed import graph
from packgraph.graphs.parameters import set_gradient_dtype
from packgraph.graphs.stages import Stage

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 16


class Model(Stages):
    """An embedding, two layers and the embedding again, in bfloat16; gradients in `dtype`."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.bfloat16()
        for parameter in self.parameters():
            parameter.grad_dtype = dtype

    def begin(self, ids):
        return {"x": self.embed(ids)}

    def stages(self):
        return [
            Stage("mlp", number, lambda state, layer=layer: {"x": layer(state["x"]).tanh()})
            for number, layer in enumerate(self.layers)
        ]

    def end(self, state):
        return (state["x"] @ self.embed.weight.t()).float().square().mean()


def train(call, model, steps=4, clear=True):
    """Outputs, gradients and parameters of each step of one to three microbatches."""
    generator, trace = torch.Generator().manual_seed(3), []
    for step in range(steps):
        outs = [
            call(torch.randint(0, 11, (size,), generator=generator))
            for size in itertools.islice((8, 6, 8), step % 3 + 1)
        ]
        for out in outs:
            out.backward()
        facts = {f"output {number}": out.detach().clone() for number, out in enumerate(outs)}
        for name, parameter in model.named_parameters():
            facts[f"gradient {name}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            facts[name] = parameter.detach().clone()
            parameter.grad = None if clear else parameter.grad.zero_()
        trace.append(facts)
    return trace


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("scope", [None, ["mlp"]], ids=str)
@pytest.mark.few(3)
def test_graphs_add_to_them_as_autograd_does(scope, granularity, clear):
    eager, model = Model(), Model()
    expected = train(eager, eager, clear=clear)
    graphed = packgraph.graph(model, warmup=1, slots=None, granularity=granularity, scope=scope)
    found = train(graphed, model, clear=clear)
    assert differences(expected, found) == [] and graphed.stats.replayed > 5
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    kinds = {value.dtype for name, value in found[-1].items() if name.startswith("gradient")}
    assert kinds == {torch.float32}


def test_in_bfloat16_the_numbers_are_others():
    """The negative control."""
    wide, narrow = Model(), Model(torch.bfloat16)
    assert differences(train(wide, wide), train(narrow, narrow)) != []


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.few(2)
def test_graphs_of_compiled_stages_add_as_their_code_does(granularity):
    options = {"compile": "aot_eager", "granularity": granularity, "slots": None}
    one, other = Model(), Model()
    eager = packgraph.graph(one, warmup=10**6, **options)
    graphed = packgraph.graph(other, warmup=1, **options)
    assert differences(train(eager, one), train(graphed, other)) == []
    assert graphed.stats.replayed > 5 and eager.stats.replayed == 0


def test_compiled_products_are_not_rounded_before_they_are_added():
    """Off by the rounding of float32, where autograd adds products in bfloat16."""
    torch.manual_seed(1)
    left, right = (torch.randn(WIDTH, 64, dtype=torch.bfloat16) for _ in range(2))
    total = torch.randn(WIDTH, WIDTH)
    right_sum = total.double() + left.double() @ right.double().t()
    found = total.clone()
    products.add_product(found, left, right.t())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right_sum, rtol=1e-6, atol=1e-5)
    rounded = total + (left @ right.t()).float()
    assert (rounded - right_sum).abs().max() > 1e-3


def test_a_gradient_of_the_users_own_is_taken_in():
    model, eager = Model(), Model()
    graphed = packgraph.graph(model, warmup=1)
    ids = torch.arange(8)
    for call, owner in ((graphed, model), (eager, eager)):
        for _ in range(3):
            call(ids).backward()
        for parameter in owner.parameters():
            parameter.grad = torch.full(parameter.shape, 1e-9)
        call(ids).backward()
    assert graphed.stats.replayed == 3
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("given", [True, False])
def test_another_dtype_after_a_capture_is_refused(given):
    model = Model(torch.bfloat16)
    graphed = packgraph.graph(model, warmup=1)
    for _ in range(3):
        graphed(torch.arange(8)).backward()
    for parameter in model.parameters():
        parameter.grad = None
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape) if given else None
    with pytest.raises(RuntimeError, match=r"grad_dtype of a parameter .* before packgraph\.graph"):
        graphed(torch.arange(8)).backward()


def test_the_dtype_of_a_gradient_that_is_there_can_be_set():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
    set_gradient_dtype(parameter, torch.float32)
    assert parameter.grad.dtype == torch.float32 and parameter.grad.tolist() == [0.5] * 3


# ---- gradients added a few dozen at a time


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


@pytest.mark.parametrize("most", [1, 100, 10**9])
def test_sums_equal_autograds(most):
    ours, theirs = stack(), stack()
    for module in (ours, theirs):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        x = torch.randn(3, 4)
        with adding_together(list(ours.parameters()), most):
            ours(x).pow(2).sum().backward()
        theirs(x).pow(2).sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_autograd_adds_again_when_it_ends():
    module = stack()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with contextlib.suppress(KeyError), adding_together(list(module.parameters())):
        raise KeyError
    module(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad.any() for parameter in module[-1:].parameters())


def test_a_backward_graph_adds_all_gradients_by_one_operation():
    graphed = graph(stack(), warmup=0)
    graphed(torch.randn(3, 4)).sum().backward()
    (variant,) = graphed.slots.all[0].variants.values()
    names = [str(function) for function, *_ in variant.regions[0].backward.graph.program]
    assert names.count("aten._foreach_add_.List") == 1
    assert not [name for name in names if name.startswith("aten.add_")]
