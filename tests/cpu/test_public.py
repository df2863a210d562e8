"""The public surface: its names, and an example of each that runs as the reference prints it."""

import doctest
import inspect
import sys
import types

import pytest
import torch

import packgraph

NAMES = {
    "Capacity",
    "CaptureError",
    "GraphedModule",
    "PackReport",
    "PackedBatch",
    "PackgraphWarning",
    "Stage",
    "Stats",
    "control",
    "eager",
    "graph",
    "linear_cross_entropy",
    "logprobs",
    "offload",
    "offload_block",
    "pack",
    "pack_stream",
    "packed_attention",
    "plan_buckets",
    "recompute",
    "replicate",
    "shard",
    "try_module",
    "verify",
}


def test_public_names():
    assert set(packgraph.__all__) == NAMES
    assert issubclass(packgraph.CaptureError, RuntimeError)
    assert issubclass(packgraph.PackgraphWarning, UserWarning)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_example_of_a_public_name_runs(name, monkeypatch):
    found = doctest.DocTestFinder(recurse=False).find(
        getattr(packgraph, name), name, globs={"packgraph": packgraph, "torch": torch}
    )
    assert sum(len(test.examples) for test in found) > 0
    said: list[str] = []
    for test in found:
        module = types.ModuleType("example")  # by which tracers look names of its functions up
        monkeypatch.setitem(sys.modules, "example", module)
        vars(module).update(test.globs, __name__="example")
        test.globs = vars(module)
        doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)


@pytest.mark.parametrize(
    "name", sorted(name for name in NAMES if not isinstance(getattr(packgraph, name), type))
)
def test_a_public_function_says_what_every_argument_is(name):
    function = getattr(packgraph, name)
    text = inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    assert [p for p in parameters.values() if f"\n    {str(p).split(':')[0]}:" not in text] == []
    assert any(f"\n{part}:\n" in text for part in ("Returns", "Yields")) or name == "eager"
