"""Every shape is dry-run once, and what only one of them does is refused."""

import functools
import itertools
import random

import pytest
import torch
from statekit import One, quietly

from packgraph.graphs import dry_run as runs
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph

FIRST, KEPT = 8, []  # the largest is captured first

COUNT = itertools.count(1)  # a lie: runs alone tell that it varies


def plain(m, x):
    return m.linear(x)


@functools.cache
def column(rows):
    return torch.arange(float(rows))[:, None]


def a_cache(m, x):
    return m.linear(x) * column(len(x))


def another_way(m, x):
    return m.linear(x).tanh() if len(x) < FIRST else m.linear(x)


def an_iterator(m, x):
    return m.linear(x) * (next(COUNT) if len(x) < FIRST else 1)


def a_draw(m, x):
    return m.linear(x) * (random.random() if len(x) < FIRST else 1.0)


def a_kept_tensor(m, x):
    out = m.linear(x)
    if len(x) < FIRST:
        KEPT.append(out)
    return out


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    KEPT.clear()
    column.cache_clear()


@pytest.fixture
def counted(monkeypatch):
    """The shapes that were dry-run."""
    once, seen = runs._once, []

    def noted(call, *more):
        seen.append(len(call.args[0]))
        return once(call, *more)

    monkeypatch.setattr(runs, "_once", noted)
    return seen


def train(function, sizes, graphed=False, compile=False):
    torch.manual_seed(3)
    module = One(function)
    model = graph(module, warmup=1, strict=True, compile=compile) if graphed else module
    if graphed:
        x = torch.randn(sizes[0], 4, requires_grad=True)
        quietly(model(x).pow(2).sum().backward)  # the warm-up
        module.zero_grad()
        model.build([(torch.randn(n, 4, requires_grad=True),) for n in dict.fromkeys(sizes)])
    torch.manual_seed(5)
    found = []
    for size in sizes:
        x = torch.randn(size, 4, requires_grad=True)
        out = model(x)
        quietly(out.pow(2).sum().backward)
        found += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return found, model


@pytest.mark.parametrize(
    "function",
    [plain, a_cache, another_way],
)
def test_every_shape_is_dry_run_once(function, counted):
    sizes = [3, 5, 8] * 4
    eager, _ = train(function, sizes)
    column.cache_clear()
    found, model = train(function, sizes, graphed=True)
    assert all(map(torch.equal, found, eager)) and len(found) == len(eager)
    assert counted == [8, 5, 3] and model.stats.replayed == len(sizes)


@pytest.mark.parametrize(
    "function",
    [an_iterator, a_draw, a_kept_tensor],
)
def test_what_only_a_further_shape_does_is_refused(function):
    train(function, [8, 8, 8], graphed=True)
    with pytest.raises(CaptureError):
        train(function, [8, 3], graphed=True)


def test_a_further_shape_may_not_switch_gradients_on():
    def forward(m, x):
        out = m.linear(x)
        if len(x) < FIRST:
            torch.set_grad_enabled(True)
        return out

    model = graph(One(forward), warmup=0, strict=True)
    with torch.no_grad():
        model(torch.randn(FIRST, 4))
        with pytest.raises(CaptureError, match="switches gradients on or off"):
            model(torch.randn(3, 4))


def test_compiled_code_of_a_further_shape_may_not_vary_either():
    _, model = train(plain, [8, 3, 8, 3], graphed=True, compile="aot_eager")
    assert model.stats.replayed == 4
    with pytest.raises(CaptureError):
        train(an_iterator, [8, 3], graphed=True, compile="aot_eager")
