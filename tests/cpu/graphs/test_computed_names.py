"""Methods that are found by a computed name, or that a library adds to all modules: a change of
what they read is seen."""

import builtins
import inspect
import operator
import subprocess
import sys

import pytest
import torch
from statekit import One, X, quietly

from packgraph.graphs.graphed import graph

SCALE = {0: 1.0}


class Dispatches(One):
    """forward reaches `scaled` by the name in an attribute."""

    def __init__(self, find):
        super().__init__(lambda module, x: find(module)(x), chosen="scaled")

    def scaled(self, x):
        return self.linear(x) * SCALE[0]


REPLAY = {
    "getattr": lambda m: getattr(m, m.chosen),
    "of the class": lambda m: getattr(type(m), m.chosen).__get__(m),
    "of builtins": lambda m: builtins.getattr(m, m.chosen),
    "in a lambda": lambda m: (lambda name: getattr(m, name))(m.chosen),
    "with a default": lambda m: getattr(m, m.chosen, None),
    "by another name": lambda m: (get := getattr)(m, m.chosen) if m.chosen else get,
}
WAYS = {
    **REPLAY,
    "attrgetter": lambda m: operator.attrgetter(m.chosen)(m),
    "methodcaller": lambda m: lambda x: operator.methodcaller(m.chosen, x)(m),
    "vars": lambda m: vars(type(m))[m.chosen].__get__(m),
    "__dict__": lambda m: type(m).__dict__[m.chosen].__get__(m),
    "__getattribute__": lambda m: m.__getattribute__(m.chosen),
    "of object": lambda m: object.__getattribute__(m, m.chosen),
    "statically": lambda m: inspect.getattr_static(m, m.chosen).__get__(m),
    "members": lambda m: next(member for name, member in inspect.getmembers(m) if name == m.chosen),
}


def is_watched(module, monkeypatch):
    """Six calls, with another number from the fourth on, equal eager or are counted."""
    graphed = graph(module, warmup=0)
    for scale in (1.0, 3.0):
        monkeypatch.setitem(SCALE, 0, scale)
        for _ in range(3):
            assert torch.equal(quietly(graphed, X), module(X))
    return graphed.stats.replayed + graphed.stats.fallbacks["capture failed"] == 6


@pytest.mark.parametrize("find", WAYS.values(), ids=WAYS)
def test_what_a_method_reads_is_watched(find, monkeypatch):
    assert is_watched(Dispatches(find), monkeypatch)


def scaled(module, x):
    return module.linear(x) * SCALE[0]


ADDED = {
    "name": lambda m, x: m.scaled(x),
    "string": lambda m, x: getattr(m, "scaled")(x),  # noqa: B009
    "beginning": lambda m, x: getattr(m, f"sca{m.rest}")(x),
    "attribute": lambda m, x: getattr(m, "scaled" if m.rest else "linear")(x),
    "value": lambda m, x: getattr(m, m.whole)(x),
    "operator": lambda m, x: m @ x,
}


@pytest.mark.parametrize("function", ADDED.values(), ids=ADDED)
def test_a_method_that_a_library_adds_to_all_modules_is_watched(function, monkeypatch):
    monkeypatch.setattr(scaled, "__module__", "pytest")  # as of an installed package
    monkeypatch.setattr(torch.nn.Module, "scaled", scaled, raising=False)
    monkeypatch.setattr(torch.nn.Module, "__matmul__", scaled, raising=False)
    assert is_watched(One(function, rest="led", whole="scaled"), monkeypatch)


def test_the_first_compilation_of_a_process_changes_nothing_about_a_module():
    """torch replaces `nn.Module.__init__` then."""
    program = """
import warnings
import torch
import packgraph

warnings.simplefilter("error", packgraph.PackgraphWarning)
graphed = packgraph.graph(torch.nn.Linear(4, 4), warmup=1)
before = torch.nn.Module.__init__
for number in range(4):
    if number == 3:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert torch.nn.Module.__init__ is not before
    graphed(torch.ones(2, 4)).sum().backward()
assert graphed.stats.captured == 1 and graphed.stats.replayed == 3, graphed.stats
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
