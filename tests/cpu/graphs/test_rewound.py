"""What a CUDA graph cannot hold of random generators, and settings under which a backward was
captured.

A CUDA graph draws by the distance from where its replay begins, and none of its calls of the host
is repeated. The recorder repeats them, so what CUDA refuses is asked for here.
"""

import _thread
import threading
import time

import pytest
import torch
from autogradkit import Net, assert_same, gradients, sample, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from packgraph.graphs.checks import random_state
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph


class Checkpointed(nn.Module):
    def __init__(self, share, inner=True):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner
        self.block, self.drop = (
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
            nn.Dropout(share),
        )

    def forward(self, x):
        hidden = self.first(x)
        if not self.inner:
            return checkpoint(self.block, self.drop(hidden), use_reentrant=False)
        return checkpoint(lambda h: self.drop(self.block(h)), hidden, use_reentrant=False)


class Setting(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.get_rng_state()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        torch.set_rng_state(self.state)
        return self.first(x)


@pytest.fixture
def as_on_cuda(monkeypatch):
    begin = random_state.Draws.__init__

    def baking(draws, generators):
        begin(draws, generators)
        draws.bakes = True

    monkeypatch.setattr(random_state.Draws, "__init__", baking)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: Checkpointed(0.5),
            "random numbers",
        ),
        (Setting, "PyTorch's tracer cannot read"),
    ],
)
def test_numbers_that_a_replay_would_draw_otherwise_are_refused(make, what):
    with pytest.raises(CaptureError, match=what) as caught:
        graph(make(), warmup=0, strict=True)(sample(0))
    assert "test_rewound.py" in caught.value.where
    before = torch.get_rng_state()
    eager, graphed = twins(make, calls=0, warmup=0)
    for model in (eager, graphed):
        torch.set_rng_state(before)
        for number in range(3):
            model(sample(number)).square().sum().backward()
    assert_same(gradients(eager), gradients(graphed))


@pytest.mark.usefixtures("as_on_cuda")
def test_a_state_that_is_set_is_refused_where_it_happens_to_be_the_present_one():
    module = Setting()
    torch.set_rng_state(module.state)
    with pytest.raises(CaptureError) as caught:
        graph(module, warmup=0, strict=True)(sample(0))
    assert "test_rewound.py" in caught.value.where


def test_a_thread_that_python_did_not_begin_could_not_draw_while_it_runs_no_code():
    """Of autograd, say: it stays in Python's list of threads when it has run a function once."""
    ended, stays = threading.Event(), threading.Event()

    def run():
        threading.current_thread()
        ended.set()

    def wait():
        threading.current_thread()
        ended.set()
        stays.wait(60)

    before = random_state.is_alone()
    for function, alone in [(run, before), (wait, False)]:
        ended.clear()
        _thread.start_new_thread(function, ())
        ended.wait(60)
        time.sleep(0.05)
        assert random_state.is_alone() == alone
    stays.set()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(
    "make", [lambda: Checkpointed(0.0), lambda: Checkpointed(0.5, inner=False)]
)
def test_checkpoints_that_draw_nothing_again_are_captured(make):
    graphed = graph(make(), warmup=1, strict=True)
    for number in range(3):
        graphed(sample(number)).sum().backward()
    assert graphed.stats.replayed == 2


def test_the_recorder_repeats_what_a_checkpoint_does_to_generators():
    eager, graphed = twins(lambda: Checkpointed(0.5), calls=0, warmup=1)
    for model in (eager, graphed):
        torch.manual_seed(4)
        for number in range(4):
            model(sample(number)).square().sum().backward()
    assert_same(gradients(eager), gradients(graphed))
    assert graphed.stats.replayed == 3


def precise():
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("change", [precise, lambda: torch.use_deterministic_algorithms(True)])
def test_settings_that_change_between_forward_and_backward_are_an_error(change):
    _, graphed = twins(Net)
    precision, deterministic = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.set_float32_matmul_precision("medium")
    try:
        for number in range(2):
            out = graphed(sample(number))[0].sum()
            out.backward()
        out = graphed(sample(3))[0].sum()
        change()
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            out.backward()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)


def test_precision_that_was_set_for_one_backend_alone_is_no_error():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        _, graphed = twins(Net)
        assert graphed.stats.replayed
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
