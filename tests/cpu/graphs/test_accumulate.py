"""Gradients added a few dozen at a time: the same bits, fewer kernels, nothing left behind."""

import pytest
import torch
from torch import nn

from packgraph.graphs.gradients import Accumulator
from packgraph.graphs.graphed import graph


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
        accumulator = Accumulator(list(ours.parameters()), most)
        accumulator.begin()
        ours(x).pow(2).sum().backward()
        accumulator.end()
        theirs(x).pow(2).sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_autograd_adds_again_when_it_ends():
    module = stack()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulator = Accumulator(list(module.parameters()))
    accumulator.begin()
    accumulator.drop()
    module(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad.any() for parameter in module[-1:].parameters())


def test_a_backward_graph_adds_all_gradients_by_one_operation():
    graphed = graph(stack(), warmup=0)
    graphed(torch.randn(3, 4)).sum().backward()
    (variant,) = graphed._slots.all[0].variants.values()
    names = [str(function) for function, *_ in variant.regions[0].backward.graph.program]
    assert names.count("aten._foreach_add_.List") == 1
    assert not [name for name in names if name.startswith("aten.add_")]
