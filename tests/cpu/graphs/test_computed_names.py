"""A method of the module is found by a computed name: a change of what it reads is seen."""

import builtins
import inspect
import operator

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


def by_getattr(m):
    return getattr(m, m.chosen)


def of_the_class(m):
    return getattr(type(m), m.chosen).__get__(m)


def by_attrgetter(m):
    return operator.attrgetter(m.chosen)(m)


def by_methodcaller(m):
    return lambda x: operator.methodcaller(m.chosen, x)(m)


def by_vars(m):
    return vars(type(m))[m.chosen].__get__(m)


def by_dict(m):
    return type(m).__dict__[m.chosen].__get__(m)


def by_getattribute(m):
    return m.__getattribute__(m.chosen)


def by_object(m):
    return object.__getattribute__(m, m.chosen)


def statically(m):
    return inspect.getattr_static(m, m.chosen).__get__(m)


def by_members(m):
    return next(member for name, member in inspect.getmembers(m) if name == m.chosen)


def by_builtins(m):
    return builtins.getattr(m, m.chosen)


def in_a_lambda(m):
    return (lambda name: getattr(m, name))(m.chosen)


def with_a_default(m):
    return getattr(m, m.chosen, None)


def by_another_name(m):
    return (get := getattr)(m, m.chosen) if m.chosen else get


WAYS = [
    by_getattr,
    of_the_class,
    by_attrgetter,
    by_methodcaller,
    by_vars,
    by_dict,
    by_getattribute,
    by_object,
    statically,
    by_members,
    by_builtins,
    in_a_lambda,
    with_a_default,
    by_another_name,
]


@pytest.mark.parametrize("find", WAYS, ids=lambda find: find.__name__)
def test_what_a_method_reads_is_watched(find, monkeypatch):
    module = Dispatches(find)
    graphed = graph(module, warmup=0)
    for scale in (1.0, 3.0):
        monkeypatch.setitem(SCALE, 0, scale)
        for _ in range(3):
            assert torch.equal(quietly(graphed, X), module(X))
    stats = graphed.stats
    assert stats.replayed + stats.fallbacks["capture failed"] == 6


@pytest.mark.parametrize(
    "find", [by_getattr, of_the_class, by_builtins, in_a_lambda, with_a_default, by_another_name]
)
def test_ways_that_replay(find):
    graphed = graph(Dispatches(find), warmup=0, strict=True)
    for _ in range(3):
        graphed(X)
    assert graphed.stats.replayed == 3


def test_a_constant_name_reaches_that_attribute_alone():
    """Negative control: other methods of the class may hold what cannot be watched."""

    class Quiet(Dispatches):
        def draws(self):
            return iter(HIDDEN)

    module = Quiet(lambda m: operator.attrgetter("scaled")(m))
    graphed = graph(module, warmup=0, strict=True)
    for _ in range(3):
        assert torch.equal(graphed(X), module(X))
    assert graphed.stats.replayed == 3


HIDDEN = iter(range(3))
