"""Captures that ranks agree on before they make them: who comes, who cannot after all."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import packgraph
from packgraph.graphs.agreement import (
    CAPTURE,
    EAGER,
    START_OVER,
    JointCaptures,
    alone,
    consensus_of,
    set_consensus,
)
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import APART
from packgraph.graphs.graphed import control
from packgraph.parallel.ranks import StoreConsensus


class Recorded:
    """A consensus that is as this rank wishes, unless another one fails, and what it was asked."""

    def __init__(self):
        self.asked, self.fails = [], None

    def __call__(self, what, error):
        self.asked.append("vote" if error is None else error.what)
        return error or self.fails

    def join(self):
        return "module"

    def meet(self, place, wish):
        self.asked.append(wish[0])
        return wish[0]

    def note(self, fact):
        self.asked.append("note")

    def all_noted(self, fact):
        return False


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale, self.looks = 1.0, False

    def forward(self, x):
        out = super().forward(x) * self.scale
        return out * float(x.sum()) if self.looks else out


def captured_together():
    model, asks = Scaled(), Recorded()
    graphed = packgraph.graph(model)
    control(graphed).capturer.cache.join(asks)
    for _ in range(3):  # two eager calls, then the capture
        graphed(torch.ones(2, 4)).sum().backward()
    assert asks.asked == [CAPTURE, *["vote"] * 4] and graphed.stats.replayed == 1
    asks.asked.clear()
    return model, graphed, asks


def test_a_rank_that_cannot_capture_after_all_says_so(recwarn):
    model, graphed, asks = captured_together()
    model.scale, model.looks = 2.0, True  # a change, and what cannot be captured
    for _ in range(2):
        graphed(torch.ones(2, 4)).sum().backward()
    assert asks.asked[:2] == [START_OVER, "vote"] and len(asks.asked) == 3
    assert "waits for the device" in asks.asked[2]
    assert graphed.stats.fallbacks["capture failed"] == 2 and graphed.stats.replayed == 1


def test_nobody_captures_where_another_rank_cannot(recwarn):
    model, graphed, asks = captured_together()
    before, asks.fails = graphed.stats.captured, CaptureError("its state", "there", "none")
    model.scale = 2.0
    graphed(torch.ones(2, 4)).sum().backward()
    assert asks.asked == [START_OVER, "vote", "note"] and graphed.stats.captured == before
    assert graphed.stats.fallbacks[APART] == 1


def test_a_replay_asks_nobody():
    _, graphed, asks = captured_together()
    for _ in range(3):
        graphed(torch.ones(2, 4)).sum().backward()
    assert not asks.asked and graphed.stats.replayed == 4


def test_another_call_at_the_same_time_does_not_take_this_ones_verdict():
    joint = JointCaptures(Recorded())
    assert joint.decide(START_OVER, "one") == START_OVER
    assert joint.decide(CAPTURE, "one") == CAPTURE
    assert joint.decide(CAPTURE, "another") == EAGER
    assert joint.confirm() is None and joint.owed is None


def test_a_module_around_one_that_exchanges_data_captures_by_its_consensus():
    inner, asks = nn.Linear(4, 4), Recorded()
    outer = nn.Sequential(nn.ReLU(), inner)
    assert consensus_of(outer) is alone
    set_consensus(inner, asks)
    assert consensus_of(outer) is asks


def test_a_meeting_waits_for_what_the_device_still_exchanges():
    """A host that runs ahead would meet another call of another rank."""
    order, store = [], dist.HashStore()
    with (
        mock.patch("packgraph.parallel.ranks._get_default_store", return_value=store),
        mock.patch("packgraph.parallel.ranks.dist.get_rank", return_value=0),
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.synchronize", side_effect=lambda: order.append("device")),
    ):
        asks = StoreConsensus("test", [0])
        with mock.patch.object(asks, "_store", wraps=store) as watched:
            watched.set.side_effect = lambda *_: order.append("store")
            with mock.patch.object(watched, "get", return_value=b"run\nit"):
                asks.meet("here", (CAPTURE, "it"))
    assert order[:2] == ["device", "store"]
