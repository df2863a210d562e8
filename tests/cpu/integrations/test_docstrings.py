"""The examples of the integrations' public names run."""

import doctest
import importlib

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integrations are of this library")

NAMES = {
    "transformers": ("PackedModel", "PackedTrainer", "PackingCollator", "packed"),
    "accelerate": ("AcceleratedModule", "prepare"),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("library", "name"), [(lib, n) for lib in NAMES for n in NAMES[lib]])
def test_the_example_runs(library, name, capsys):
    module = importlib.import_module(f"packgraph.integrations.{library}")
    found = doctest.DocTestFinder(recurse=False).find(
        getattr(module, name), name, globs={"packgraph": packgraph, "torch": torch}
    )
    assert sum(len(test.examples) for test in found) > 0
    said = []
    flags = doctest.ELLIPSIS
    for test in found:
        doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert not said, "".join(said)
