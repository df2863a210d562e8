"""Python state that forward reads, of whatever kind: a change after the capture is seen before
the next replay."""

import enum
import sys
import threading
import types
from types import SimpleNamespace

import hiddenkit
import numpy as np
import pytest
import torch
import watchkit
from hiddenkit import CASES_OF_ONE_MODULE
from statekit import One, X, captured, quietly
from watchkit import CASES, Classy

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.guards import Classes

FACTOR = 1.0


@pytest.fixture(autouse=True)
def as_before():
    """Globals are put back."""
    yield
    watchkit.put_back()
    globals().update(FACTOR=1.0)


def steps(model, count, seed):
    """Outputs and gradients of some calls on changing data."""
    torch.manual_seed(seed)
    found = []
    for _ in range(count):
        model.zero_grad()
        x = torch.randn(3, 4)
        out = quietly(model, x)
        quietly(lambda out=out: out.square().sum().backward())
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def is_told(graphed, calls):
    """Whether every call was replayed, or has run eagerly under a counted reason."""
    return graphed.stats.replayed + graphed.stats.fallbacks.total() == calls


# Those of one module in hiddenkit are entries of the corpus.
@pytest.mark.parametrize("case", [case for case in CASES if case not in CASES_OF_ONE_MODULE])
@pytest.mark.few(4)
def test_a_change_of_what_forward_reads_is_seen(case):
    make, change, _ = CASES[case]
    torch.manual_seed(1)
    eager, module = make(), make()
    graphed = graph(module, warmup=1)
    assert equal(steps(eager, 3, 7), steps(graphed, 3, 7))
    change(eager)
    change(module)
    assert equal(steps(eager, 3, 8), steps(graphed, 3, 8)) and is_told(graphed, 6)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] is not None])
@pytest.mark.few(4)
def test_the_same_value_once_more_is_no_change(case):
    make, _, again = CASES[case]
    torch.manual_seed(1)
    eager, module = make(), make()
    graphed = graph(module, warmup=1)
    assert equal(steps(eager, 3, 7), steps(graphed, 3, 7))
    for _ in range(2):
        again(module)
        again(eager)
        assert equal(steps(eager, 2, 8), steps(graphed, 2, 8))
    assert is_told(graphed, 7)


@pytest.mark.parametrize("case", ["an equal list", "a set of the same size"])
def test_an_equal_container_is_watched_in_place_of_the_old_one(case):
    make, _, again = CASES[case]
    graphed = captured(make(), X)
    again(graphed.module)
    graphed(X)
    assert not graphed.stats.recaptures
    held = graphed.module.c
    held.append(7.0) if isinstance(held, list) else held.add(7)
    with pytest.warns(PackgraphWarning, match="capturing again"):
        assert torch.equal(graphed(X), graphed.module(X))


def test_what_no_code_names_may_change():
    graphed = captured(One(lambda m, x: m.linear(x)), X)
    watchkit.SCALE, watchkit.SETTINGS.scale, Classy.scale = 3.0, 3.0, 3.0
    graphed(X)
    assert graphed.stats.replayed == 3 and not graphed.stats.recaptures


def test_the_message_says_where():
    for case, words in {
        "a namespace": r"module\.c\.scale == 1\.0",
        "a global": r"SCALE == 1\.0",
        "a long list": r"module\.c\[99\] == 1\.0",
        "a class attribute": r"'scale'\] == 1\.0",
        "a teacher in a list: its weights' storage": "the storage of .*weight.* was replaced",
    }.items():
        make, change, _ = CASES[case]
        graphed = captured(make(), X)
        change(graphed.module)
        with pytest.warns(PackgraphWarning, match=words):
            graphed(X)
        watchkit.put_back()


def test_computed_names_of_other_things_watch_no_globals():
    def forward(m, x):
        x = getattr(m, f"lin{m.which}")(x)
        x = getattr(torch.nn.functional, m.activation)(x)
        return x * sys.modules[__name__].FACTOR * vars(m)[m.name]

    module = One(forward, which="ear", activation="relu", name="factor", factor=1.0)
    graphed = captured(module, X)
    globals().update(UNREAD=iter(()))
    watchkit.SCALE = hiddenkit.BY_NAME = 3.0
    graphed(X)
    assert graphed.stats.replayed == 3 and not graphed.stats.recaptures
    globals().update(FACTOR=2.0)
    with pytest.warns(PackgraphWarning, match="capturing again"):
        assert torch.equal(graphed(X), module(X))


def test_attributes_of_each_thread_are_those_of_the_thread_that_calls():
    module = One(lambda m, x: m.linear(x) * getattr(hiddenkit.LOCAL, "scale", 3.0))
    graphed = captured(module, X)
    found = []

    def call():
        found.append((quietly(graphed, X), module(X)))

    for _ in range(2):
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert all(torch.equal(one, other) for one, other in found)
    assert torch.equal(found[0][1] * 3, found[1][1]) and graphed.stats.replayed > 2


class Kind(type):
    pass


class OwnKind(Kind, metaclass=Kind):
    """A class that is its own metaclass, as h11 has them."""


OwnKind.__class__ = OwnKind


def test_a_class_that_is_its_own_metaclass_is_walked_once():
    graphed = captured(One(lambda m, x: m.linear(x) * len(OwnKind.__name__)), X)
    graphed(X)
    assert graphed.stats.replayed == 3 and not graphed.stats.recaptures


def test_an_object_of_a_tool_is_watched_though_the_tool_is_not():
    packaging = pytest.importorskip("packaging.version", reason="comes with pytest")

    class Scale:
        def __init__(self):
            self.settings = {"scale": 2.0}

    Scale.__module__ = packaging.__name__
    module = One(lambda m, x: m.linear(x) * m.held.settings["scale"], held=Scale())
    graphed = graph(module, warmup=0)
    graphed(X).sum().backward()
    module.held.settings["scale"] = 3.0
    with pytest.warns(PackgraphWarning, match="scale"):
        assert torch.equal(graphed(X), module(X))


def test_a_counter_of_a_library_that_each_shape_moves_once():
    library = types.ModuleType("counting_of_a_test")
    sys.modules["counting_of_a_test"] = library
    exec(
        "import itertools\n"
        "counter, compiled = itertools.count(), {}\n"
        "def scaled(x):\n"
        "    if x.shape not in compiled:\n"
        "        compiled[x.shape] = next(counter)\n"
        "    return x * (2.0 + compiled[x.shape])\n",
        library.__dict__,
    )
    module = One(lambda m, x: library.scaled(m.linear(x)))
    graphed = graph(module, warmup=1)
    for rows in (3, 3, 2, 3, 2):
        assert torch.equal(quietly(graphed, X[:rows]), module.linear(X[:rows]) * (5 - rows))
    assert library.compiled == {(3, 4): 0, (2, 4): 1} and next(library.counter) == 2


def test_masked_arrays_are_watched_with_their_masks():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])

    def forward(m, x):
        return m.linear(x) * float(m.c.filled(3.0).sum())

    graphed = captured(One(forward, c=masked, nothing=np.ma.masked), X)
    for change in (
        lambda: masked.data.__setitem__(1, 7.0),
        lambda: masked.mask.__setitem__(1, False),
    ):
        change()
        assert torch.equal(quietly(graphed, X), graphed.module(X))


# ---- numbers that classes hold, which torch 2.11 takes for fixed


class OfSettings:
    factor = 1.0


class Settings(OfSettings):
    scale, unread = 1.0, 1.0


class OfMode(enum.Enum):
    SOFT = 1


OfMode.SOFT.scale = 1.0


def forward(x):
    return x * Settings.scale * Settings.factor * OfMode.SOFT.scale


@pytest.mark.parametrize(
    ("holder", "name", "value", "seen"),
    [
        (Settings, "scale", 2.0, True),
        (Settings, "scale", True, True),
        (OfSettings, "factor", 2.0, True),
        (OfMode.SOFT, "scale", 2.0, True),
        (Settings, "unread", 2.0, False),
    ],
)
@pytest.mark.parametrize("read", [Settings, Settings()])
def test_change_of_a_number_that_is_read_is_seen(monkeypatch, read, holder, name, value, seen):
    classes = Classes([forward.__code__])
    guard = SimpleNamespace(name="G['Settings']")
    classes.note(
        [
            SimpleNamespace(orig_guard=guard, value=each, has_value=True, guard_type="CLASS_MATCH")
            for each in (read, OfMode)
        ]
    )
    assert classes.hold()
    monkeypatch.setattr(holder, name, value)
    assert classes.hold() is not seen
    monkeypatch.undo()
    assert classes.hold()
