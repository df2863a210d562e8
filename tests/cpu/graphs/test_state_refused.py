"""State that changes by being read, and large or foreign state: every call equals eager's, replayed
or under a counted reason."""

import collections
import ctypes
import functools
import gc
import itertools
import logging
import multiprocessing
import queue
import random
import threading
import types
import warnings
import weakref

import numpy
import pytest
import torch
from statekit import One, X, quietly
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.step import GraphedStep

RNG = random.Random(3)


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


def is_told(graphed, calls):
    """Whether every call was replayed, or has run eagerly under a counted reason."""
    return graphed.stats.replayed + graphed.stats.fallbacks.total() == calls


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


@pytest.mark.parametrize("where", ["closure", "global", "default", "method"])
def test_state_that_the_code_names_equals_eager(where):
    held = random.Random(5)
    RNG.seed(5)
    forward = {
        "closure": lambda m, x: m.linear(x) * held.random(),
        "global": lambda m, x: m.linear(x) * RNG.random(),
        "default": lambda m, x, held=held: m.linear(x) * held.random(),
        "method": functools.partial(lambda draw, m, x: m.linear(x) * draw(), held.random),
    }[where]
    graphed = graph(One(forward), warmup=0)
    with pytest.warns(PackgraphWarning, match="test_state_refused.py"):
        found = run(graphed)
    held.seed(5)
    RNG.seed(5)
    assert same(found, run(One(forward))) and graphed.stats.fallbacks["capture failed"] == 5


def test_strict_raises_in_every_call():
    graphed = graph(
        reading(lambda held: held.random(), lambda m: m.held, held=random.Random(1)),
        warmup=0,
        strict=True,
    )
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            graphed(X)
    assert "test_state_refused.py" in caught.value.where and caught.value.remedy
    assert graphed.module.held.random() == random.Random(1).random()


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


def test_a_torch_generator_draws_as_in_eager():
    def make():
        return One(
            lambda m, x: m.linear(x) * torch.rand(4, generator=m.held),
            held=torch.Generator().manual_seed(1),
            also=[random.random, numpy.random.rand],
        )

    graphed = graph(make(), warmup=0)
    assert same(quietly(run, graphed), run(make())) and is_told(graphed, 5)


LARGE = {
    "an array": (lambda: numpy.zeros(2**20), lambda held: held.__setitem__(7, 3.0)),
    "bytes": (lambda: bytearray(2**21), lambda held: held.__setitem__(7, 3)),
    "a list": (lambda: [0] * 30_000, lambda held: held.__setitem__(7, 3)),
    "a deque": (lambda: collections.deque([0] * 30_000), lambda held: held.__setitem__(7, 3)),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_state_that_is_read_and_changes_equals_eager(kind):
    make, change = LARGE[kind]
    read = lambda m, x: m.linear(x) * (1.0 + float(m.held[7]))  # noqa: E731
    eager, module = One(read, held=make()), One(read, held=make())
    graphed = graph(module, warmup=0)
    for _ in range(2):
        assert same(quietly(run, graphed, 3), run(eager, 3))
        change(eager.held)
        change(module.held)
    assert is_told(graphed, 6)


@pytest.mark.parametrize("kind", LARGE)
def test_large_state_that_is_not_read_replays(kind):
    graphed = graph(One(held=LARGE[kind][0]()), warmup=0, strict=True)
    run(graphed)
    assert graphed.stats.replayed == 5


def test_hooks_of_a_teacher_are_followed():
    def make():
        torch.manual_seed(4)
        teacher = nn.Linear(4, 4).requires_grad_(False)
        teacher.register_forward_hook(lambda module, args, out: out * 2)
        return One(lambda m, x: m.linear(x) + m.held[0](x), held=[teacher])

    eager, graphed = make(), graph(make(), warmup=0)
    for _ in range(2):
        assert same(quietly(run, graphed, 3), run(eager, 3))
        for module in (eager, graphed.module):
            module.held[0].register_forward_hook(lambda module, args, out: out + 1)
    assert is_told(graphed, 6)


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


@pytest.mark.parametrize("kind", ["pointer", "semaphore"])
def test_pointers_and_state_of_other_processes_equal_eager(kind):
    if kind == "pointer":
        held = ctypes.pointer(ctypes.c_float(1.0))
        module = One(lambda m, x: m.linear(x) * m.held.contents.value, held=held)
        change = lambda: setattr(held.contents, "value", 2.0)  # noqa: E731
    else:
        held = multiprocessing.Semaphore(2)
        module = One(lambda m, x: m.linear(x) * m.held.get_value(), held=held)
        change = held.acquire
    graphed = graph(module, warmup=0)
    for _ in range(2):
        for _ in range(3):
            assert torch.equal(quietly(graphed, X), module(X))
        change()
    assert is_told(graphed, 6)


def test_a_lock_a_logger_and_a_proxy_equal_eager():
    Slotted = type("Slotted", (), {"__slots__": ("proxy",)})
    module = One(lambda m, x: m.linear(x) * m.held.proxy.scale, held=Slotted())
    module.also = [multiprocessing.Lock(), threading.local(), logging.getLogger("any")]
    module.target = Scale()
    module.held.proxy = weakref.proxy(module.target)
    graphed = graph(module, warmup=0)
    for scale in (1.0, 2.0):
        module.target.scale = scale
        for _ in range(3):
            assert torch.equal(quietly(graphed, X), module(X))
    assert is_told(graphed, 6)


class Scale:
    scale = 1.0
