"""Small modules whose forward is given by the test, and the calls that most tests of module state
make."""

import inspect
import warnings
from functools import partial

import torch
from graphkit import Stages
from torch import nn

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Stage

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class One(nn.Module):
    """A linear layer and a forward given from outside."""

    def __init__(self, forward=None, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.function = forward or (lambda module, x: module.linear(x))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *more):
        return self.function(self, x, *more)


class Staged(Stages, One):
    """A captured stage, an eager one given from outside, and a captured one."""

    def __init__(self, between=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.between = between or (lambda module, state: state)

    def stages(self):
        apply = lambda layer, state: {"x": layer(state["x"])}  # noqa: E731
        return [
            Stage("attn", 0, partial(apply, self.layers[0])),
            Stage("moe_dispatch", 0, lambda state: self.between(self, state)),
            Stage("mlp", 0, partial(apply, self.layers[1])),
        ]


def quietly(call, *args):
    with warnings.catch_warnings(action="ignore", category=PackgraphWarning):
        return call(*args)


def train(module, x, calls=1):
    for _ in range(calls):
        quietly(lambda: module(x).square().sum().backward())


def captured(module, x, **options):
    graphed = graph(module, warmup=0, **options)
    train(graphed, x, 2)
    return graphed


def wheres(function):
    """What an error may say of where it is: the lines of the function's body, or its only one."""
    lines, first = inspect.getsourcelines(function)
    body = range(first + 1, first + len(lines)) if len(lines) > 1 else [first]
    file = inspect.getsourcefile(function)
    return [f"{file}:{line} in {function.__name__}" for line in body]


def is_told(graphed, calls):
    """Whether every call was replayed, or has run eagerly under a counted reason."""
    return graphed.stats.replayed + graphed.stats.fallbacks.total() == calls


def doing(effect, after=lambda hidden: hidden):
    """A forward that does something beside its layer. effect: of (module, input, hidden)."""

    def forward(m, x):
        hidden = m.linear(x)
        effect(m, x, hidden)
        return after(hidden)

    return forward
