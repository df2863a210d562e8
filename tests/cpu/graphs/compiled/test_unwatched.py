"""What is not looked at while code is compiled, and that what was compiled is looked at again."""

import contextlib
import random
import sys

import pytest
import torch
from torch import nn

import packgraph
from packgraph.graphs.checks.host_calls import (
    Watcher,
    compiling_begins,
    compiling_ends,
    unwatched_compiling,
    watched_calls,
)
from packgraph.graphs.compiled.compiler import Compiler
from packgraph.graphs.fallback import Stats
from packgraph.graphs.stages import Stage, compile_units_of, run_stages


class Files(Watcher):
    """The files whose functions were called, and the names of some C functions."""

    def __init__(self):
        self.files, self.draws = set(), 0

    def entered(self, frame):
        self.files.add(frame.f_code.co_filename)

    def builtins(self):
        return {"getrandbits": self._drawn}

    def _drawn(self, frame, function, done):
        self.draws += done


@torch.library.custom_op("packgraph_test::plus_one", mutates_args=())
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1 + 0 * random.getrandbits(1)


@plus_one.register_fake
def _(x):
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def stages(self):
        return [Stage("layer", 0, self.layer)]

    def layer(self, state):
        return {"x": self.linear(state["x"]) + plus_one(state["x"].detach())}

    def begin(self, x):
        return {"x": x}

    def end(self, state):
        return state["x"]

    def forward(self, x):
        return run_stages(self, x)


def compile_and_run(watcher):
    torch.compiler.reset()
    compiler = Compiler("aot_eager", Stats())
    with watched_calls(watcher):
        compiler.run(compile_units_of(Model().stages()), {"x": torch.ones(2, 4)})
    assert compiler.stats.compiled == 1


def is_of_dynamo(file):
    return file.endswith("symbolic_convert.py")


def test_the_compiler_is_not_looked_at_and_its_code_is():
    seen = Files()
    compile_and_run(seen)
    assert seen.draws == 1, "the operation of the compiled code"
    assert not any(map(is_of_dynamo, seen.files))


@pytest.mark.parametrize("told", [True, False])
def test_an_end_that_is_not_told_is_an_error(told):
    """Dynamo tells the end of the last of all compilers alone, and others may run in threads."""
    with watched_calls(Files()), contextlib.ExitStack() as stack:
        if not told:
            stack.enter_context(pytest.raises(packgraph.CaptureError, match="another thread"))
        with unwatched_compiling():
            compiling_begins()
            if told:
                compiling_ends()


def test_the_profiler_of_somebody_else_sees_the_compiler():
    files = set()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    try:
        compile_and_run(Files())
    finally:
        sys.setprofile(None)
    assert any(map(is_of_dynamo, files))


def test_an_operation_of_somebody_else_in_compiled_code_is_captured():
    torch.compiler.reset()
    graphed = packgraph.graph(Model(), warmup=0, strict=True, compile="aot_eager")
    for _ in range(3):
        graphed(torch.ones(2, 4)).sum().backward()
    assert graphed.stats.replayed == 3
