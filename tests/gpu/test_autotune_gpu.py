"""Timing CUDA graphs against eager in real steps: the pace of host and device, no number changed,
memory given back."""

import dataclasses
import time

import pytest
import torch
from trainkit import CAPACITIES, RandomPacks, state_of, tiny, trainer

from packgraph.graphs.backend import Stopwatch
from packgraph.graphs.graphed import Control
from packgraph.train.autotune import FASTER, TIMED
from packgraph.train.config.reading import render
from packgraph.train.signals import StopRequest
from packgraph.train.strategies import MicrobatchExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
NAMES = [render(capacity) for capacity in CAPACITIES]


def train(folder, autotune, granularity="layer", graph=True):
    made = tiny(graph, steps=40, checkpoint_every=1000)
    made = dataclasses.replace(
        made, graph=dataclasses.replace(made.graph, autotune=autotune, granularity=granularity)
    )
    run = trainer(folder, made, RandomPacks(), device=CUDA)
    summary = run.run(StopRequest())
    state = state_of(run)
    run.close()
    return state, summary


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_timing_changes_no_number(granularity, tmp_path):
    """By default it is on."""
    tuned, summary = train(tmp_path / "tuned", "auto", granularity)
    plain, _ = train(tmp_path / "plain", False, granularity)
    assert not [name for name in plain if not torch.equal(plain[name], tuned[name])]
    assert summary["fallbacks"][TIMED] > 0
    assert all(
        choice["decided"] and choice["eager_ms"] > 0 for choice in summary["choices"].values()
    )


def test_what_launching_costs_is_seen_though_the_device_has_little_to_do(tmp_path, monkeypatch):
    """A host that needs 10 ms for an eager microbatch and nothing for a replay: events alone must
    show both."""
    fall_back = Control.fall_back

    def slow(self, reason, args, kwargs):
        time.sleep(0.01)
        return fall_back(self, reason, args, kwargs)

    monkeypatch.setattr(Control, "fall_back", slow)
    choices = train(tmp_path / "tuned", True)[1]["choices"]
    for name in NAMES:
        assert (
            choices[name]["way"] == "replay"
            and choices[name]["eager_ms"] > 10 > choices[name]["replay_ms"]
        )


def test_slow_graphs_are_given_up_and_their_memory_comes_back(tmp_path):
    """The replays are made slow on the device: no host time shows it."""
    timed: list[bool] = []
    forward_backward = Control.forward_backward

    def slow(own, *args, **options):
        before = own.stats.replayed
        loss = forward_backward(own, *args, **options)
        if own.stats.replayed > before:
            torch.cuda._sleep(40_000_000)  # cycles: about 20 ms
            timed.append(True)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "forward_backward", slow)
        tuned, summary = train(tmp_path / "tuned", True)
    assert timed and {choice["way"] for choice in summary["choices"].values()} == {"eager"}
    assert summary["pool_bytes"] == 0 and summary["fallbacks"][FASTER] > 0
    eager, _ = train(tmp_path / "eager", False, graph=False)
    assert not [name for name in eager if not torch.equal(eager[name], tuned[name])]


def test_nothing_in_a_timed_step_waits_for_the_device(tmp_path, monkeypatch):
    """R13: the waits are those of the clock, between steps."""
    run_step, inside, waits = MicrobatchExecutor.run_step, [], []
    wait = Stopwatch.wait

    def watched(self, *args):
        if self.replays:
            torch.cuda.set_sync_debug_mode("error")
        inside.append(True)
        result = run_step(self, *args)
        inside.pop()
        torch.cuda.set_sync_debug_mode("default")
        return result

    monkeypatch.setattr(MicrobatchExecutor, "run_step", watched)
    monkeypatch.setattr(Stopwatch, "wait", lambda self: waits.append(bool(inside)) or wait(self))
    train(tmp_path / "tuned", True)
    assert waits and not any(waits)
