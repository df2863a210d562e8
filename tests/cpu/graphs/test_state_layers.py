"""What others put into classes of torch."""

import subprocess
import sys

import pytest
import torch
from statekit import One, X, quietly

from packgraph.graphs.graphed import graph

SCALE = {0: 1.0}


def scaled(module, x):
    return module.linear(x) * SCALE[0]


def by_name(module, x):
    return module.scaled(x)


def by_string(module, x):
    return getattr(module, "scaled")(x)  # noqa: B009


def by_beginning(module, x):
    return getattr(module, f"sca{module.rest}")(x)


def by_attribute(module, x):
    return getattr(module, "scaled" if module.rest else "linear")(x)


def by_value(module, x):
    return getattr(module, module.whole)(x)


def by_an_operator(module, x):
    return module @ x


@pytest.mark.parametrize(
    "function", [by_name, by_string, by_beginning, by_attribute, by_value, by_an_operator]
)
def test_a_method_that_a_library_adds_to_all_modules_is_watched_where_code_names_it(
    function, monkeypatch
):
    monkeypatch.setattr(scaled, "__module__", "pytest")  # as of an installed package
    monkeypatch.setattr(torch.nn.Module, "scaled", scaled, raising=False)
    monkeypatch.setattr(torch.nn.Module, "__matmul__", scaled, raising=False)
    module = One(function, rest="led", whole="scaled")
    graphed = graph(module, warmup=0)
    for scale in (1.0, 3.0):
        monkeypatch.setitem(SCALE, 0, scale)
        for _ in range(3):
            assert torch.equal(quietly(graphed, X), module(X))
    stats = graphed.stats
    assert stats.replayed + stats.fallbacks["capture failed"] == 6


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
