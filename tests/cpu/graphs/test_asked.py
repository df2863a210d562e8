"""Code that asks whether it is captured or compiled, and goes another way then."""

import sys
import threading

import pytest
import torch
from statekit import One, quietly

from packgraph.graphs.cuda import backend
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph
from packgraph.ops import symmetric_memory


def is_in_a_capture():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run_captured":
            return True
        frame = frame.f_back
    return False


def another_operation(module, x):
    return module.linear(x).relu() if is_in_a_capture() else module.linear(x).tanh()


def another_number(module, x):
    return module.linear(x) * (2.0 if is_in_a_capture() else 1.0)


def another_expert(module, x):
    return module.experts[int(is_in_a_capture())](x)


def another_part_of_a_weight(module, x):
    return x @ module.stacked[int(is_in_a_capture())]


def one_more(module, x):
    out = module.linear(x)
    return out + 1.0 if is_in_a_capture() else out


def of(function):
    module = One(function)
    module.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    module.stacked = torch.nn.Parameter(torch.randn(2, 4, 4))
    return module


@pytest.mark.parametrize(
    "function",
    [another_operation, another_number, another_expert, another_part_of_a_weight, one_more],
)
def test_code_that_looks_for_a_capture_on_the_stack_is_refused(function):
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError) as refused:
        graph(of(function), warmup=0, strict=True)(x)
    assert "test_asked.py" in refused.value.where
    module = of(function)
    graphed = graph(module, warmup=0)
    with pytest.warns(UserWarning, match="running eagerly"):
        assert torch.equal(graphed(x), module(x))
    assert graphed.stats.captured == 0


@pytest.mark.parametrize(
    "asks",
    [
        lambda: torch.compiler.is_compiling(),
        lambda: torch.compiler.is_dynamo_compiling(),
        lambda: torch._dynamo.is_compiling(),
        lambda: torch.jit.is_tracing(),
    ],
    ids=["is_compiling", "is_dynamo_compiling", "of dynamo", "of jit"],
)
def test_code_that_asks_whether_it_is_compiled_equals_eager(asks):
    def forward(module, x):
        return module.linear(x) * (2.0 if asks() else 1.0)

    module = One(forward)
    graphed = graph(module, warmup=0)
    for _ in range(3):
        assert torch.equal(quietly(graphed, torch.ones(3, 4)), module(torch.ones(3, 4)))
    assert graphed.stats.replayed + graphed.stats.fallbacks["capture failed"] == 3


@pytest.fixture
def capturing(monkeypatch):
    """torch says that the current stream is captured, wherever it is asked."""
    monkeypatch.setattr(backend, "_is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", backend._is_capturing)


def asked_by(module):
    """What code of a module is told."""
    found = {}
    exec(
        compile("found = is_capturing()", module.__file__, "exec"),
        {"is_capturing": torch.cuda.is_current_stream_capturing},
        found,
    )
    return found["found"]


@pytest.mark.usefixtures("capturing")
def test_code_of_modules_is_told_that_it_is_not_captured():
    elsewhere = []
    with backend.told_as_in_eager_calls():
        with backend.told_as_in_eager_calls():
            assert not torch.cuda.is_current_stream_capturing()
        assert not torch.cuda.is_current_stream_capturing()
        assert asked_by(torch.nn)
        assert asked_by(symmetric_memory)  # which must not allocate in a capture
        thread = threading.Thread(
            target=lambda: elsewhere.append(torch.cuda.is_current_stream_capturing())
        )
        thread.start()
        thread.join()
    assert elsewhere == [True]
    assert torch.cuda.is_current_stream_capturing()
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is backend._is_capturing
