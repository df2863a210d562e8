"""On the device: captures that find no memory or are interrupted, 0-d tensors for numbers, calls
that are watched."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import packgraph
from packgraph.graphs import cache, fallback
from packgraph.graphs.cuda.backend import CudaWindow
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Noisy(nn.Module):
    """Draws random numbers and writes to a buffer: what a capture that fails half-way must undo."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, factor=1.0):
        self.calls.add_(1)
        return nn.functional.dropout(self.linear(x), 0.3) * factor


def made(**options):
    module = Noisy().cuda()
    return (
        copy.deepcopy(module),
        graph(module, warmup=0, **options),
        torch.randn(8, 64, device="cuda"),
    )


def steps(model, x, count, *more):
    torch.manual_seed(5)
    outs = []
    for _ in range(count):
        with warnings.catch_warnings(action="ignore", category=PackgraphWarning):
            out = model(x, *more)
        out.square().sum().backward()
        outs.append(out.detach().clone())
    return [*outs, *(p.grad for p in model.parameters()), model.calls, torch.cuda.get_rng_state()]


def same(eager, graphed, x, count, *more):
    pairs = zip(steps(eager, x, count, *more), steps(graphed, x, count, *more), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def fail(monkeypatch, after, break_off):
    """Let capture number `after` end in `break_off`, called while the stream is capturing; later
    ones go well."""
    original, count = CudaWindow.capture, [0]

    def capture(self, run, scratch=False):
        def broken():
            result = run()
            if count[0] == after:
                count[0] += 1
                break_off()
            count[0] += 1
            return result

        return original(self, broken, scratch)

    monkeypatch.setattr(CudaWindow, "capture", capture)


def ask_for_too_much():
    torch.empty(
        torch.cuda.get_device_properties(0).total_memory * 2, dtype=torch.uint8, device="cuda"
    )


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1])
def test_memory_that_comes_back_lets_graphs_be_captured_later(monkeypatch, after):
    eager, graphed, x = made()
    fail(monkeypatch, after, ask_for_too_much)
    monkeypatch.setattr(cache, "CALLS_BETWEEN", (3, 9))
    assert same(eager, graphed, x, 10)
    assert graphed.stats.fallbacks == {fallback.NO_MEMORY: 4} and graphed.stats.replayed == 6


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_capture_is_undone_and_the_next_call_captures(monkeypatch, after):
    eager, graphed, x = made(strict=True)
    fail(monkeypatch, after, interrupt)
    with pytest.raises(KeyboardInterrupt):
        graphed(x)
    assert not graphed.stats.fallbacks and packgraph.control(graphed).failures == 0
    assert same(eager, graphed, x, 5) and graphed.stats.replayed == 5


def test_a_zero_dimensional_tensor_is_the_way_out():
    eager, graphed, x = made(strict=True)
    for number in range(6):
        assert same(eager, graphed, x, 1, torch.tensor(number / 7, device="cuda"))
    assert graphed.stats.captured == 1 and graphed.stats.replayed == 6


def test_a_number_on_the_host_is_named_with_the_device_that_is_meant():
    _, graphed, x = made()
    with pytest.warns(
        PackgraphWarning, match="argument 'factor' is a tensor on cpu, and the module is on cuda"
    ):
        graphed(x, torch.tensor(0.5))


@pytest.mark.parametrize(
    "around", [lambda: torch.autograd.detect_anomaly(), lambda: FlopCounterMode(display=False)]
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_watched_call_runs_eagerly_and_the_next_replays(around):
    eager, graphed, x = made()
    assert same(eager, graphed, x, 3)
    with around():
        assert same(eager, graphed, x, 2)
    assert same(eager, graphed, x, 3)
    assert graphed.stats.replayed == 6 and graphed.stats.captured == 1


@pytest.mark.parametrize("nvtx", [False, True])
def test_profilers_see_named_replays_and_change_no_bit(nvtx):
    eager, graphed, x = made()
    expected = steps(eager, x, 5)
    with (
        torch.autograd.profiler.emit_nvtx(enabled=nvtx),
        torch.autograd.profiler.profile(enabled=not nvtx) as profiler,
    ):
        found = steps(graphed, x, 5)
    assert graphed.stats.replayed == 5 and all(map(torch.equal, expected, found))
    names = [] if nvtx else [event.name for event in profiler.function_events]
    assert names.count("packgraph module forward slot 0 8x64") == (
        0 if nvtx else 5 + graphed.stats.compared
    )
