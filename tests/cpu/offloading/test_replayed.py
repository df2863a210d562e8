"""What graphs take is read off their last replay, and a run plans by that instead of by eager
microbatches."""

from dataclasses import replace

import pytest
import torch
from offloadkit import DENSE, config
from trainkit import RandomPacks, state_of, tiny, trainer

from packgraph.graphs.copy_streams import captured_copy_streams
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder import copy_streams as recorder_lanes
from packgraph.graphs.recorder.copy_streams import RecordedCopyStreams
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.api import attach
from packgraph.offloading.plan import KEPT, CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.runtime import OffloadRuntime
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import OffloadConfig
from packgraph.train.features import offload as offloading
from packgraph.train.signals import StopRequest

EAGER, REPLAYED, WAIT = 1000.0, 10.0, 300.0  # seconds of a group, and of a copy that main waits for
CAPACITY = Capacity(24, 4)
INNER = tuple(name for name in DENSE if "norm" not in name)


class Clock:
    """A clock that groups and waits move, eager ones and recorded ones by different times."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(recorder_lanes.time, "perf_counter", lambda: self.now)
        wait = RecordedCopyStreams.wait

        def slow_wait(copy_streams, copy):
            if not copy.done and copy.scope == copy_streams.scope:
                copy_streams._window.note(lambda: self.tick(WAIT), [])
            wait(copy_streams, copy)

        monkeypatch.setattr(RecordedCopyStreams, "wait", slow_wait)
        for name in ("_commit", "_reached"):
            monkeypatch.setattr(OffloadRuntime, name, self.working(getattr(OffloadRuntime, name)))

    def tick(self, seconds):
        self.now += seconds

    def working(self, call):
        def work(*given):
            copy_streams = captured_copy_streams()
            self.tick(EAGER)
            if isinstance(copy_streams, RecordedCopyStreams):
                copy_streams._window.note(lambda: self.tick(REPLAYED), [])
            call(*given)

        return work


def everything(trace: OffloadTrace) -> OffloadPlan:
    count = len(trace.groups)
    return OffloadPlan((True,) * count, tuple(range(count)), 1)


def nothing(trace: OffloadTrace) -> OffloadPlan:
    return OffloadPlan((False,) * len(trace.groups), (KEPT,) * len(trace.groups), 1)


def replayed(
    monkeypatch, policy, granularity="chunk", times_graphs=True, modules=INNER, scope=None
):
    """(eager trace, what graphs that follow `policy` took)"""
    Clock(monkeypatch)
    model = DecoderModel(config(layers=3), seed=1)
    batch, tokens = (
        PackedBatch.build([[1, 2, 3], [4, 5]], CAPACITY),
        torch.ones((), dtype=torch.int64),
    )
    graphed = graph(
        model, capacities=[CAPACITY], warmup=0, granularity=granularity, scope=scope, strict=True
    )
    runtime = OffloadRuntime(
        modules,
        graphed.capture_backend.copy_streams,
        min_bytes=1,
        policy=policy,
        times_graphs=times_graphs,
    )
    attach(runtime, model)
    graphed.run_eagerly(batch, tokens).backward()
    eager = runtime.trace
    graphed.build([(batch, tokens)])
    compared = runtime.replayed(CopySpeed()) is not None
    assert compared is (times_graphs and granularity == "chunk" and scope is None)
    with graphed.frozen():
        for _ in range(2):
            graphed.forward_backward(batch, tokens)
    found = runtime.replayed(CopySpeed())
    graphed.close()
    return eager, found


@pytest.mark.parametrize("policy", [everything, nothing])
def test_what_graphs_take_is_the_compute_of_their_replays_alone(policy, monkeypatch):
    eager, (found, speed) = replayed(monkeypatch, policy)
    assert speed == CopySpeed()
    assert eager.forward_us > 0 < eager.backward_us
    for name in ("forward_us", "backward_us"):
        for one, other in ((eager, found), *zip(eager.groups, found.groups, strict=True)):
            assert getattr(other, name) == pytest.approx(getattr(one, name) * REPLAYED / EAGER)
    assert [replace(group, forward_us=0, backward_us=0) for group in found.groups] == [
        replace(group, forward_us=0, backward_us=0) for group in eager.groups
    ]


@pytest.mark.parametrize(
    "without", [{"granularity": "layer"}, {"scope": ("attn",)}, {"times_graphs": False}], ids=str
)
@pytest.mark.few(3)
def test_nothing_is_said_of_passes_in_pieces_and_of_graphs_without_clocks(without, monkeypatch):
    assert replayed(monkeypatch, nothing, **without)[1] is None


def finish(folder, monkeypatch, granularity="chunk", **offload):
    options = (
        OffloadConfig(modules=DENSE[1:4], min_bytes=1, margin=0, **offload)
        if offload
        else OffloadConfig()
    )
    plain = tiny(graph=True, steps=8)
    graphs = replace(plain.graph, strict=True, granularity=granularity)
    run = trainer(folder, replace(plain, graph=graphs, offload=options), RandomPacks())
    if not offload:
        run.run(StopRequest())
        state = state_of(run)
        run.close()
        return state, None, []
    Clock(monkeypatch)
    plans = []
    run.executor.prepare.when_planned = lambda prepared: plans.append(prepared.planners[0].planned)
    slow = CopySpeed(
        1.5e-4, 1.5e-4, 0.0
    )  # bytes a microsecond: a group takes minutes, as long as many in graphs
    monkeypatch.setattr(offloading, "copy_speed", lambda device: slow)
    run.run(StopRequest())
    state, totals = state_of(run), run.executor.totals()
    run.close()
    return state, totals, plans


@pytest.mark.parametrize("granularity", ["chunk", "step"])
@pytest.mark.few(2)
def test_a_run_plans_again_by_its_graphs_and_stays_bitwise(granularity, tmp_path, monkeypatch):
    kept, _, _ = finish(tmp_path / "kept", monkeypatch)
    state, totals, (first, second) = finish(tmp_path / "run", monkeypatch, granularity, lost=0.01)
    assert state.keys() == kept.keys() and all(
        torch.equal(state[name], kept[name]) for name in kept
    )
    assert second[0].compute_us == pytest.approx(first[0].compute_us * REPLAYED / EAGER)
    assert 0 <= second[2].moved_bytes < first[2].moved_bytes, "graphs hide less than eager work"
    assert second[2].lost <= 0.01
    assert set(totals["fallbacks"]) <= {"warm-up"}, totals


@pytest.mark.slow
def test_a_run_that_is_told_what_moves_plans_once(tmp_path, monkeypatch):
    _, _, plans = finish(tmp_path / "run", monkeypatch, fraction=0.5)
    assert len(plans) == 1
