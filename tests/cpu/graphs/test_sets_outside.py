"""Plain values that forward sets outside of the module: the same in every call, as a cache is
filled, or put back between calls, so that every call has to set them."""

import contextvars
import os
import types

import pytest
import torch
from statekit import One, X, quietly

from packgraph.graphs.graphed import graph

SCALE = 2.0
BOX, TABLE, ROWS = types.SimpleNamespace(), {}, [0.0]
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


class Holder:
    scale = 1.0


def cell():
    scale = 1.0

    def put(value):
        nonlocal scale
        scale = value

    return put, lambda: scale


PUT, GET = cell()


def in_a_global(module, x):
    global SCALE
    SCALE = 2.0
    return module.linear(x)


def in_an_object(module, x):
    BOX.scale = 2.0
    return module.linear(x)


def in_a_dict(module, x):
    TABLE["scale"] = 2.0
    return module.linear(x)


def in_a_list(module, x):
    ROWS[0] = 2.0
    return module.linear(x)


def in_a_class(module, x):
    Holder.scale = 2.0
    return module.linear(x)


def in_a_closure(module, x):
    PUT(2.0)
    return module.linear(x)


def in_a_context_variable(module, x):
    VARIABLE.set(2.0)
    return module.linear(x)


def in_the_environment(module, x):
    os.environ["PACKGRAPH_TEST_SCALE"] = "2.0"
    return module.linear(x)


def put_back():
    global SCALE
    SCALE = BOX.scale = TABLE["scale"] = ROWS[0] = Holder.scale = 1.0
    PUT(1.0)
    VARIABLE.set(1.0)
    os.environ["PACKGRAPH_TEST_SCALE"] = "1.0"


def product():
    environment = float(os.environ["PACKGRAPH_TEST_SCALE"])
    outside = SCALE * BOX.scale * TABLE["scale"] * ROWS[0] * Holder.scale * GET()
    return outside * VARIABLE.get() * environment


FORWARDS = [
    in_a_global,
    in_an_object,
    in_a_dict,
    in_a_list,
    in_a_class,
    in_a_closure,
    in_a_context_variable,
    in_the_environment,
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setenv("PACKGRAPH_TEST_SCALE", "1.0")
    yield
    put_back()


@pytest.mark.parametrize("resets", [range(6), [4], [3, 4]], ids=["always", "once", "twice"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_what_forward_sets_is_set_by_every_call(forward, resets):
    found = []
    for model in (One(forward), graph(One(forward), warmup=1)):
        put_back()
        outs = []
        for call in range(6):
            if call in resets:
                put_back()
            loss = quietly(lambda model=model: model(X)) * product()
            loss.sum().backward()
            outs.append(loss.detach())
        found.append(torch.stack(outs))
    assert torch.equal(*found)


def test_the_line_that_sets_is_named():
    put_back()
    model = graph(One(in_an_object), warmup=1)
    model(X).sum().backward()
    put_back()
    with pytest.warns(UserWarning, match=r"test_sets_outside.py:\d+ in in_an_object"):
        model(X).sum().backward()
    put_back()
    quietly(lambda: model(X)).sum().backward()
    assert BOX.scale == 2.0 and model.stats.fallbacks["capture failed"] == 2
