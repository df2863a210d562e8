"""The public surface: its names, and an example of each that runs as the reference prints it."""

import doctest
import inspect
import os
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import packgraph
from packgraph.graphs.graphed import Control
from packgraph.packing.pack import PackStream

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

RETURNED = {
    "PackStream": PackStream,
    "Control": Control,
}  # by public functions; in the reference, too


def test_public_names():
    assert set(packgraph.__all__) == NAMES
    assert issubclass(packgraph.CaptureError, RuntimeError)
    assert issubclass(packgraph.PackgraphWarning, UserWarning)


def test_only_public_names_are_listed_and_misspelt_ones_answered():
    assert set(dir(packgraph)) == {*NAMES, "__version__"}
    for given, near in [("grpah", "graph"), ("packstream", "pack_stream"), ("Graph", "graph")]:
        with pytest.raises(
            AttributeError, match=f"no attribute '{given}', did you mean {near}\\?$"
        ):
            getattr(packgraph, given)
    with pytest.raises(AttributeError, match=r"no attribute 'elephant'$"):
        getattr(packgraph, "elephant")  # noqa: B009


def test_the_help_of_a_graphed_module_fits_a_screen():
    graphed = packgraph.graph(torch.nn.Linear(4, 4))
    for asked in (packgraph.GraphedModule, graphed):
        text = pydoc.render_doc(asked, renderer=pydoc.plaintext)
        assert len(text.splitlines()) <= 45 and "requires_grad_" not in text
        assert "stats: Counts" in text and "Calls the module: by replay" in text
    assert {"requires_grad_", "in_features", "stats", "close"} <= {*dir(graphed)}


USER = """
import packgraph
import torch
from torch import Tensor


class Model(torch.nn.Module):
    width = 8

    def forward(self, batch: packgraph.PackedBatch, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return batch.tokens * scale, batch.labels


def evaluate(graphed: packgraph.GraphedModule) -> None:
    reveal_type(graphed(1, two=2))


capacity = packgraph.Capacity(tokens=8, documents=2)
stream = packgraph.pack_stream([[1, 2]], capacity)
position: dict[str, object] = stream.state_dict()
graphed = packgraph.graph(Model(), capacities=[capacity])
reveal_type([graphed(batch) for batch in stream])
reveal_type(graphed.stats.fallbacks)
reveal_type(graphed.module.width)
reveal_type(graphed.width)
reveal_type(graphed.eval())
packgraph.control(graphed).build([(next(stream),)])
evaluate(graphed)
graphed(3)
"""


@pytest.mark.slow
def test_type_checkers_see_what_a_graphed_module_takes_and_returns(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    source = Path(packgraph.__file__).parents[1]
    assert (source / "packgraph" / "py.typed").exists()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            str(tmp_path / "cache"),
            "user.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(source)},  # as where it is installed: by py.typed
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert revealed == [
        "Any",
        "list[tuple[torch._tensor.Tensor, torch._tensor.Tensor]]",
        "collections.Counter[str]",
        "int",
        "Any",
        "packgraph.graphs.graphed.GraphedModule[user.Model]",
    ], done.stdout + done.stderr
    (error,) = re.findall("error: (.*)", done.stdout)
    assert 'incompatible type "int"; expected "PackedBatch"' in error


@pytest.mark.parametrize("name", sorted({*NAMES, *RETURNED}))
def test_the_example_of_a_public_name_runs(name, monkeypatch):
    named = RETURNED.get(name) or getattr(packgraph, name)
    assert "\nExamples:\n" in inspect.getdoc(named)
    found = doctest.DocTestFinder(recurse=isinstance(named, type)).find(
        named, name, globs={"packgraph": packgraph, "torch": torch}
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
