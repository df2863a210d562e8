"""Twins for what autograd is asked of a module: one eager, one graphed, and what must agree."""

import copy

import torch
from graphkit import poison_free_slots
from torch import nn

from packgraph import graph


class Net(nn.Module):
    """Two outputs, a frozen weight, a parameter that only the second output reads, a statistic that
    forward writes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.aside = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        hidden = (self.first(x) * self.frozen).tanh()
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return self.second(hidden), self.aside(hidden).sqrt()


def twins(make=Net, calls=3, **options):
    """An eager module, and its graphed twin after `calls` calls with backward."""
    torch.manual_seed(1)
    eager = make()
    graphed = graph(copy.deepcopy(eager), **options)
    for model in (eager, graphed):
        for number in range(calls):
            model(sample(number))[0].square().sum().backward()
    return eager, graphed


def sample(number, **options):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).requires_grad_(
        **options
    )


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, a in left.items():
        b = right[name]
        assert (a is None) == (b is None), name
        assert (
            a is None or torch.equal(a, b) or torch.equal(a.nan_to_num(7.7), b.nan_to_num(7.7))
        ), name


def run_both(eager, graphed, act):
    """`act(model, number)` on both, poisoned slots in between; results, if there are any, and
    gradients must agree."""
    for number in range(10, 14):
        poison_free_slots(graphed, 0)
        found = [act(model, number) or () for model in (eager, graphed)]
        assert_same(dict(enumerate(found[0])), dict(enumerate(found[1])))
        assert_same(gradients(eager), gradients(graphed))
        assert_same(dict(eager.named_buffers()), dict(graphed.named_buffers()))


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self, x, self.linear(x))
