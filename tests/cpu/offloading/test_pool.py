"""What graphs of a module that offloads will take is said before they are captured, and saying it
changes nothing."""

import itertools

import pytest
import torch
from offloadkit import DENSE, EXPERTS, by_hand, config, foretold_and_taken, warmed

from packgraph.graphs.errors import CaptureError
from packgraph.graphs.memory.trial import trial_memory
from packgraph.graphs.recorder.backend import RecorderWindow
from packgraph.offloading.plan import CopySpeed
from packgraph.offloading.search import plan_for_time

POLICIES = {
    "everything": None,
    "half": by_hand(fraction=0.5),
    "planned": lambda trace: plan_for_time(trace, CopySpeed(), 0.5),
}
QUICK_POSTPONED = (("layer", "planned"),)
QUICK_TRACED = (("everything", False), ("planned", True))


@pytest.mark.parametrize(
    ("experts", "granularity", "slots"),
    [
        (False, "chunk", 3),
        (True, "layer", 1),
        pytest.param(False, "chunk", 1, marks=pytest.mark.slow),
        pytest.param(True, "chunk", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (way != "planned"))
        for way in ("kept", *POLICIES)
    ],
)
def test_what_graphs_take_is_predicted_with_what_has_moved(way, experts, granularity, slots):
    """Twin of the test on CUDA, to the byte."""
    modules, options = (EXPERTS if experts else DENSE), {"parts": 8 if way == "planned" else 1}
    modules, options = ((), {}) if way == "kept" else (modules, options | {"policy": POLICIES[way]})
    foretold, taken = foretold_and_taken(
        config(3, experts), modules, granularity=granularity, slots=slots, **options
    )
    assert foretold == taken > 0


@pytest.mark.parametrize(
    ("granularity", "way"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK_POSTPONED))
        for case in itertools.product(("layer", "chunk"), POLICIES)
    ],
)
def test_what_eager_work_postpones_graphs_do_not(granularity, way):
    """So what is sent after the next launch of a graph in eager work is gone in time in a trace,
    too."""
    foretold, taken = foretold_and_taken(
        config(3), DENSE, granularity=granularity, policy=POLICIES[way], postpones=True
    )
    assert foretold == taken


@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.parametrize("scope", [("attn",), ("mlp",)])
@pytest.mark.few(4)
def test_what_eager_stages_between_have_saved_is_not_the_graphs(scope, postpones):
    foretold, taken = foretold_and_taken(
        config(3, experts=True), EXPERTS, granularity="layer", scope=scope, postpones=postpones
    )
    assert foretold == taken


def test_a_capture_that_is_thrown_away_keeps_no_host_memory(monkeypatch):
    graphed, _, arguments = warmed(config(), DENSE)
    taken, close = [], RecorderWindow.close
    monkeypatch.setattr(
        RecorderWindow,
        "close",
        lambda self: (
            taken.append(((held := self.copy_streams.memories), held.arenas.nbytes()))
            or close(self)
        ),
    )
    trial_memory(graphed, [arguments], 1)
    ((memories, before),) = taken
    assert before > 0 and memories.arenas.nbytes() == 0 and memories.is_trial
    graphed.close()


@pytest.mark.parametrize(
    ("way", "times_graphs"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK_TRACED))
        for case in itertools.product(POLICIES, (False, True))
    ],
)
@pytest.mark.few(6)
def test_a_trace_leaves_engine_and_lanes_as_they_were(way, times_graphs):
    """So what is captured after it is what would be captured without, and eager work stays eager
    work."""
    facts = []
    for traces in (0, 1):
        graphed, runtime, arguments = warmed(
            config(), DENSE, policy=POLICIES[way], times_graphs=times_graphs, late=("out", "back")
        )
        passes, seen, trace = runtime._looks, runtime._largest, runtime.trace
        memory = runtime.copy_streams.memories.arenas.nbytes()
        for _ in range(traces):
            trial_memory(graphed, [arguments], 1)
        assert runtime._captured == [], (
            "nobody will ask for times of graphs that are gone, whose host memory they hold"
        )
        assert (
            runtime.copy_streams.scope == 0
            and runtime.copy_streams.timed is None
            and not runtime.copy_streams._under_way
        )
        assert runtime._looks == passes and runtime._largest is seen and runtime.trace == trace
        assert runtime.copy_streams.memories.arenas.nbytes() == (0 if traces else memory), (
            "it is the next capture's"
        )
        assert runtime.times_graphs == times_graphs
        torch.manual_seed(3)
        for _ in range(3):
            graphed(*arguments).backward()
        assert graphed.stats.replayed == 3
        assert (runtime.replayed(CopySpeed()) is not None) == (
            times_graphs and runtime.plan is not None
        )
        facts.append(([p.grad.clone() for p in graphed.parameters()], graphed.stats.pool_bytes))
    (plain, pool), (after, taken) = facts
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True)) and pool == taken


def test_a_trace_that_has_no_room_leaves_no_copy_under_way(monkeypatch):
    """Their sources would be held, beside all that is measured later."""
    graphed, runtime, arguments = warmed(config(), DENSE, late=("out", "back"))
    own, under_way, windows = RecorderWindow.own, [], []

    def full(self, tensor):
        own(self, tensor)
        under_way.append(len(self.copy_streams._under_way))
        windows.append(self)
        if under_way[-1]:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RecorderWindow, "own", full)
    with pytest.raises(CaptureError, match="no room"):
        trial_memory(graphed, [arguments], 1)
    assert (
        under_way[-1]
        and not windows[-1].copy_streams._under_way
        and not runtime.copy_streams._under_way
    )
    monkeypatch.undo()
    fresh, _, same_arguments = warmed(config(), DENSE, late=("out", "back"))
    assert trial_memory(graphed, [arguments], 1) == trial_memory(fresh, [same_arguments], 1)
