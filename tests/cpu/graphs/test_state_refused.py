"""State that changes by being read, and large or foreign state: every call equals eager's, replayed
or under a counted reason."""

import collections
import functools
import gc
import itertools
import queue
import random
import types
import warnings

import numpy
import pytest
import torch
from statekit import One, X, is_told, quietly
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.step import GraphedStep


def filled(kind):
    made = kind()
    for value in range(1, 30):
        made.put(float(value))
    return made


def lines(tmp_path):
    path = tmp_path / "numbers"
    path.write_text("\n".join(map(str, range(1, 40))))
    return open(path)


HELD = {
    "random.Random": (lambda _: random.Random(1), lambda held: held.random()),
    "numpy.random._generator.Generator": (
        lambda _: numpy.random.default_rng(1),
        lambda held: float(held.random()),
    ),
    "numpy.random.mtrand.RandomState": (
        lambda _: numpy.random.RandomState(1),
        lambda held: float(held.rand()),
    ),
    "itertools.count": (lambda _: itertools.count(1), next),
    "list_iterator": (lambda _: iter([float(i) for i in range(30)]), next),
    "generator": (lambda _: (float(i) for i in range(30)), next),
    "_io.TextIOWrapper": (lines, lambda held: float(held.readline())),
    "queue.Queue": (lambda _: filled(queue.Queue), lambda held: held.get()),
    "_queue.SimpleQueue": (lambda _: filled(queue.SimpleQueue), lambda held: held.get()),
}
WRAPS = {
    "attribute": (lambda held: held, lambda m: m.held),
    "list": (lambda held: [held], lambda m: m.held[0]),
    "object": (lambda held: types.SimpleNamespace(inner=held), lambda m: m.held.inner),
    "partial": (lambda held: functools.partial(lambda inner: inner, held), lambda m: m.held()),
}


def reading(draw, get, **attributes):
    return One(lambda m, x: m.linear(x) * draw(get(m)), **attributes)


def run(model, calls=5):
    torch.manual_seed(2)
    found = []
    for _ in range(calls):
        model.zero_grad()
        out = model(torch.randn(3, 4))
        out.square().sum().backward()
        found += [out.detach(), model.linear.weight.grad.clone()]
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", HELD)
def test_state_that_reading_moves_equals_eager_and_is_told_once(kind, wrap, tmp_path):
    make, draw = HELD[kind]
    put, get = WRAPS[wrap]
    eager = run(reading(draw, get, held=put(make(tmp_path))))
    module = reading(draw, get, held=put(make(tmp_path)))
    graphed = graph(module, warmup=1)
    # of modules that earlier tests have left to be collected
    with warnings.catch_warnings(action="ignore"):
        gc.collect()
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert same(eager, run(graphed))
    told = [str(w.message) for w in caught if issubclass(w.category, PackgraphWarning)]
    assert len(told) == 1 and "running eagerly" in told[0]
    assert dict(graphed.stats.fallbacks) == {"warm-up": 1, "capture failed": 4}
    assert not graphed.stats.captured


def test_a_held_generator_that_is_not_read_is_fine():
    graphed = graph(One(held=random.Random(1)), warmup=0, strict=True)
    run(graphed)
    assert graphed.stats.replayed == 5


def test_state_that_comes_later_ends_replays():
    module = reading(lambda held: held.random() if held else 1.0, lambda m: m.held, held=None)
    graphed = graph(module, warmup=0)
    run(graphed)
    module.held = random.Random(1)
    eager = reading(lambda held: held.random(), lambda m: m.held, held=random.Random(1))
    with pytest.warns(PackgraphWarning, match="Random"):
        found = run(graphed)
    assert (
        same(found, run(eager))
        and graphed.stats.replayed == 5
        and graphed.stats.fallbacks["capture failed"] == 5
    )


LARGE = [numpy.zeros(2**20), bytearray(2**21), [0] * 30_000, collections.deque([0] * 30_000)]


@pytest.mark.parametrize("held", LARGE, ids=["an array", "bytes", "a list", "a deque"])
def test_large_state_that_is_not_read_replays(held):
    graphed = graph(One(held=held), warmup=0, strict=True)
    run(graphed)
    assert graphed.stats.replayed == 5


def test_a_step_refuses_what_reading_moves():
    module = reading(lambda held: held.random(), lambda m: m.held, held=random.Random(1))
    step = GraphedStep([module], lambda x: module(x).sum(), RecorderBackend(), torch.device("cpu"))
    with pytest.raises(CaptureError) as caught:
        step(X)
    assert "test_state_refused.py" in caught.value.where


@pytest.mark.parametrize("make", ["scripted", "traced"])
@pytest.mark.parametrize("where", ["child", "list"])
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
def test_modules_of_torch_jit_equal_eager(make, where):
    def made():
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        inner = torch.jit.script(plain) if make == "scripted" else torch.jit.trace(plain, X)
        held = inner if where == "child" else [inner]
        return One(lambda m, x: (m.held if where == "child" else m.held[0])(m.linear(x)), held=held)

    def found(model):
        torch.manual_seed(2)
        inputs = [torch.randn(3, 4) for _ in range(5)]
        outs = [model(x) for x in inputs]
        sum(out.square().sum() for out in outs).backward()
        return [*outs, *(p.grad for p in model.parameters())]

    graphed = graph(made(), warmup=0)
    assert same(quietly(found, graphed), found(made())) and is_told(graphed, 5)
