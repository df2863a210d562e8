"""Python state that forward reads, of whatever kind: a change after the capture is seen before
the next replay."""

import enum
from types import SimpleNamespace

import pytest
import torch
import watchkit
from hiddenkit import CASES_OF_ONE_MODULE
from statekit import One, X, captured, is_told, quietly
from watchkit import CASES, Classy

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.guards import Classes


@pytest.fixture(autouse=True)
def as_before():
    """Globals are put back."""
    yield
    watchkit.put_back()


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
