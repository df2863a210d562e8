"""State that cannot be watched: the module runs eagerly under a reason of its own, unless the
user vouches for it."""

import collections
import ctypes
import functools
import gc
import itertools
import logging
import multiprocessing
import queue
import random
import re
import threading
import types
import warnings
import weakref

import hiddenkit
import numpy
import pytest
import torch
from statekit import One, X, quietly
from torch import nn

import packgraph
from packgraph.graphs.checks.state_kinds import ASSUMED, WATCHED, Treatment, row_of
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import HIDDEN_STATE
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
    "attribute": (lambda held: held, lambda m: m.held, "'held' is"),
    "list": (lambda held: [held], lambda m: m.held[0], r"'held\[0\]' is"),
    "object": (
        lambda held: types.SimpleNamespace(inner=held),
        lambda m: m.held.inner,
        r"'held\.inner' is",
    ),
    "partial": (
        lambda held: functools.partial(lambda inner: inner, held),
        lambda m: m.held(),
        r"'held\.args\[0\]' is",
    ),
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
def test_hidden_state_is_refused_and_counted_and_warned_about_once(kind, wrap, tmp_path):
    make, draw = HELD[kind]
    put, get, words = WRAPS[wrap]
    eager = run(reading(draw, get, held=put(make(tmp_path))))
    module = reading(draw, get, held=put(make(tmp_path)))
    graphed = graph(module, warmup=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that earlier tests have left to be collected
        gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(eager, run(graphed))
    told = [str(w.message) for w in caught if issubclass(w.category, PackgraphWarning)]
    assert len(told) == 1 and "assume_constant" in told[0]
    assert re.search(f"{words} of type {kind}", told[0]), told[0]
    assert (
        dict(graphed.stats.fallbacks) == {"warm-up": 1, HIDDEN_STATE: 4}
        and not graphed.stats.captured
    )


@pytest.mark.parametrize("where", ["closure", "global", "default", "method"])
def test_hidden_state_that_the_code_names_is_refused(where):
    held = random.Random(5)
    RNG.seed(5)
    forward = {
        "closure": lambda m, x: m.linear(x) * held.random(),
        "global": lambda m, x: m.linear(x) * RNG.random(),
        "default": lambda m, x, held=held: m.linear(x) * held.random(),
        "method": functools.partial(lambda draw, m, x: m.linear(x) * draw(), held.random),
    }[where]
    graphed = graph(One(forward), warmup=0)
    with pytest.warns(PackgraphWarning, match=r"is of type random\.Random"):
        found = run(graphed)
    held.seed(5)
    RNG.seed(5)
    assert same(found, run(One(forward))) and graphed.stats.fallbacks[HIDDEN_STATE] == 5


def test_strict_raises_in_every_call():
    graphed = graph(One(held=random.Random(1)), warmup=0, strict=True)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"'held' is of type random\.Random") as caught:
            graphed(X)
    assert (
        "test_state_refused.py" in caught.value.where and "assume_constant" in caught.value.remedy
    )


def test_a_module_that_no_longer_holds_it_is_captured():
    module = One(held=random.Random(1))
    graphed = graph(module, warmup=0)
    quietly(run, graphed)
    module.held = None
    run(graphed)
    assert graphed.stats.fallbacks[HIDDEN_STATE] == 5 and graphed.stats.replayed == 5


def test_hidden_state_that_comes_later_ends_replays():
    module = reading(lambda held: held.random() if held else 1.0, lambda m: m.held, held=None)
    graphed = graph(module, warmup=0)
    run(graphed)
    module.held = random.Random(1)
    eager = reading(lambda held: held.random(), lambda m: m.held, held=random.Random(1))
    with pytest.warns(PackgraphWarning, match=r"random\.Random"):
        found = run(graphed)
    assert (
        same(found, run(eager))
        and graphed.stats.replayed == 5
        and graphed.stats.fallbacks[HIDDEN_STATE] == 5
    )


def test_a_torch_generator_and_the_global_generators_are_fine():
    module = One(
        lambda m, x: m.linear(x) * torch.rand(4, generator=m.held),
        held=torch.Generator().manual_seed(1),
    )
    module.also = [random.random, numpy.random.rand]
    graphed = graph(module, warmup=0)
    run(graphed)
    assert graphed.stats.replayed == 5 and not graphed.stats.fallbacks


@pytest.mark.parametrize(
    "held",
    [
        lambda: numpy.zeros(2**20),
        lambda: bytearray(2**21),
        lambda: [0] * 30_000,
        lambda: collections.deque([0] * 30_000),
        lambda: (
            [[i] for i in range(19_999)]
            and [[[i] for i in range(19_990)], [[i] for i in range(50)]]
        ),
    ],
    ids=["an array", "bytes", "a list", "a deque", "many lists"],
)
def test_what_is_too_large_to_compare_is_refused(held):
    graphed = graph(One(held=held()), warmup=0)
    with pytest.warns(PackgraphWarning, match="too many to be compared before every call"):
        run(graphed)
    assert graphed.stats.fallbacks[HIDDEN_STATE] == 5


def test_a_global_of_which_nothing_is_known_is_refused():
    graphed = graph(hiddenkit.BOTH_NAMES_COMPUTED(), warmup=0)
    with pytest.warns(PackgraphWarning, match="import the module by its name"):
        run(graphed)
    assert graphed.stats.fallbacks[HIDDEN_STATE] == 5


@pytest.mark.parametrize(
    "held",
    [lambda: (0,) * 30_000, lambda: dict.fromkeys(range(30_000), 0), lambda: read_only()],
    ids=["a tuple", "a dict", "a read-only array"],
)
def test_what_is_large_but_cannot_change_or_shows_it_is_fine(held):
    graphed = graph(One(held=held()), warmup=0, strict=True)
    run(graphed)
    assert graphed.stats.replayed == 5


def read_only():
    array = numpy.zeros(2**20)
    array.setflags(write=False)
    return array


def test_a_read_only_array_that_becomes_writable_is_noticed():
    graphed = graph(One(held=read_only()), warmup=0)
    run(graphed)
    graphed.module.held.setflags(write=True)
    with pytest.warns(PackgraphWarning, match="the contents of 'held' changed"):
        graphed(X)


def test_a_teacher_with_hooks_is_refused():
    teacher = nn.Linear(4, 4).requires_grad_(False)
    teacher.register_forward_hook(lambda *_: None)
    graphed = graph(One(lambda m, x: m.linear(x) + m.held[0](x), held=[teacher]), warmup=0)
    with pytest.warns(PackgraphWarning, match=r"'held\[0\]' is a module with hooks"):
        run(graphed)
    assert graphed.stats.fallbacks[HIDDEN_STATE] == 5


def test_a_step_refuses_hidden_state():
    module = One(held=random.Random(1))
    step = GraphedStep([module], lambda x: module(x).sum(), RecorderBackend(), torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"is of type random\.Random"):
        step(X)


# ---- what the user vouches for


@pytest.mark.parametrize("kind", HELD)
def test_what_is_assumed_constant_is_not_refused(kind, tmp_path):
    held = HELD[kind][0](tmp_path)
    assert packgraph.assume_constant(held) is held
    graphed = graph(One(held=[held]), warmup=0, strict=True)
    run(graphed)
    assert graphed.stats.replayed == 5


def test_assuming_after_the_refusal_helps_at_the_next_call():
    module = One(held=random.Random(1))
    graphed = graph(module, warmup=0)
    quietly(run, graphed)
    packgraph.assume_constant(module.held)
    run(graphed)
    assert graphed.stats.replayed == 5


def test_what_is_assumed_constant_may_change_but_not_be_replaced():
    config = types.SimpleNamespace(scale=1.0, other=[1])
    module = One(
        lambda m, x: m.linear(x) * m.config.scale, config=packgraph.assume_constant(config)
    )
    graphed = graph(module, warmup=0)
    run(graphed)
    config.scale = 2.0
    config.other.append(2)
    graphed(X)
    assert graphed.stats.replayed == 6 and not graphed.stats.recaptures
    module.config = types.SimpleNamespace(scale=3.0)
    with pytest.warns(PackgraphWarning, match="'config' changed"):
        assert torch.equal(graphed(X), module(X))


def test_a_module_is_assumed_constant_with_all_it_holds():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.0)))
    graphed = graph(module, warmup=0)
    packgraph.assume_constant(module[1])
    for _ in range(3):
        graphed(X).square().sum().backward()
    module[1][0].p, module[1].note = 0.0001, "new"
    graphed(X)
    assert graphed.stats.replayed == 4 and not graphed.stats.recaptures


@pytest.mark.parametrize("value", [1, 1.5, "a", None, True, numpy.float32(1), torch.float32])
def test_a_plain_value_cannot_be_assumed_constant(value):
    with pytest.raises(TypeError, match="known by its value"):
        packgraph.assume_constant(value)


def test_assuming_keeps_nothing_alive_where_it_need_not():
    held = random.Random(1)
    packgraph.assume_constant(held)
    gone = weakref.ref(held)
    del held
    gc.collect()
    assert gone() is None
    fresh = [random.Random(i) for i in range(50)]  # one of them may live where the other did
    assert not any(one in ASSUMED for one in fresh)
    kept = packgraph.assume_constant([1])
    assert kept in ASSUMED and [1] not in ASSUMED


# ---- the table


def test_every_row_says_what_and_why_and_every_value_has_one():
    assert all(
        row.what and row.kinds and row.reason and isinstance(row.treatment, Treatment)
        for row in WATCHED
    )
    assert len({row.what for row in WATCHED}) == len(WATCHED) and WATCHED[-1].kinds == (object,)
    kinds = [
        (1, Treatment.VALUE),
        (nn.Linear(1, 1), Treatment.MODULE),
        (object(), Treatment.ATTRIBUTES),
        (numpy.float64(1), Treatment.VALUE),
        (numpy.ones(1), Treatment.BYTES),
        (iter([]), Treatment.REFUSED),
        (torch.Generator(), Treatment.IDENTITY),
        (len, Treatment.FUNCTION),
        (int, Treatment.CLASS),
        (random, Treatment.NAMESPACE),
        (weakref.ref(RNG), Treatment.REFERENT),
        ({}, Treatment.CONTENTS),
        (torch.ones(1), Treatment.TENSOR),
    ]
    for value, treatment in kinds:
        assert row_of(value).treatment is treatment, value


@pytest.mark.parametrize("make", ["scripted", "traced"])
@pytest.mark.parametrize("where", ["child", "list"])
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
def test_modules_of_torch_jit_run_eagerly(make, where):
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
    with pytest.warns(PackgraphWarning, match=r"is a module of torch\.jit") as caught:
        assert same(found(graphed), found(made()))
    assert sum("is a module of torch.jit" in str(told.message) for told in caught) == 1
    assert graphed.stats.fallbacks[HIDDEN_STATE] == 5 and not graphed.stats.captured


def test_pointers_and_state_of_other_processes_are_refused():
    held = [ctypes.pointer(ctypes.c_float(1.0)), multiprocessing.Semaphore(2)]
    for one in held:
        graphed = graph(One(held=one), warmup=0)
        with pytest.warns(PackgraphWarning, match="cannot be compared before a replay"):
            run(graphed)
        assert graphed.stats.fallbacks[HIDDEN_STATE] == 5


def test_a_lock_a_logger_and_a_proxy_are_no_hidden_state():
    Slotted = type("Slotted", (), {"__slots__": ("proxy",)})
    module = One(lambda m, x: m.linear(x) * m.held.proxy.scale, held=Slotted())
    module.also = [multiprocessing.Lock(), threading.local(), logging.getLogger("any")]
    module.target = Scale()
    module.held.proxy = weakref.proxy(module.target)
    graphed = graph(module, warmup=0)
    run(graphed)
    assert graphed.stats.replayed == 5 and not graphed.stats.fallbacks
    module.target.scale = 2.0
    with pytest.warns(PackgraphWarning, match="capturing again"):
        found = graphed(X)
    assert torch.equal(found, module(X))


class Scale:
    scale = 1.0
