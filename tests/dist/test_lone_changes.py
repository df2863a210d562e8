"""Layers and chunks as graphs of ranks that exchange data in them: a module that changes on one
rank alone makes that rank run eagerly, and ranks capture again together or not at all."""

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import RankFailed, run_ranks
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from tracekit import differences
from trainkit import PacksOfOneCapacity, tiny, trainer

import packgraph
from packgraph.graphs import capture as capture_module
from packgraph.graphs.agreement import CAPTURE, EAGER, START_OVER, JointCaptures, verdict
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.fallback import APART
from packgraph.models.config import ExpertConfig
from packgraph.packing.capacity import Capacity
from packgraph.parallel import ranks as consensus
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import parts_of
from packgraph.parallel.ranks import StoreConsensus
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

STEPS = 8
WAYS = {
    "tp": ParallelConfig(dp=1, tp=2),
    "cp": ParallelConfig(dp=1, cp=2),
    "ep": ParallelConfig(dp=2, ep=2),
    "shard": ParallelConfig(dp=2, shard="parameters"),
}
SHARED = "because ranks capture together"


def config(way, *, graph=True, granularity="chunk", steps=STEPS):
    made = tiny(graph=graph, steps=steps, checkpoint_every=100, tokens_per_step=150)
    shape = dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, hidden_size=32)
    if way == "ep":
        experts = ExpertConfig(count=4, per_token=2, intermediate_size=24)
        shape = dataclasses.replace(shape, experts=experts)
    return dataclasses.replace(
        made,
        model=shape,
        parallel=WAYS[way],
        graph=dataclasses.replace(
            made.graph, granularity=granularity, capacities=(Capacity(64, 8),)
        ),
        optimizer=dataclasses.replace(made.optimizer, clip_norm=0.3, decay_steps=20),
    )


def rounds_otherwise(model, changed):
    """Of this rank alone, in eager runs too."""
    model.norm.eps *= 2 if changed else 0.5


def drops_otherwise(model, changed):
    next(iter(model.layers.values())).dropout = 0.4 if changed else 0.1


handles = []


def hooks(model, changed):
    if changed:
        handles.append(model.norm.register_forward_pre_hook(lambda *_: None))
    else:
        handles.pop().remove()


def fails_later(model, changed):
    """The next capture fails, behind its exchanges."""
    original = capture_module.capture_variant

    def failing(*args, **kwargs):
        original(*args, **kwargs)
        raise CaptureError("out of room", "model.py:1 in forward", "give it some")

    capture_module.capture_variant = failing
    rounds_otherwise(model, changed)


CHANGES = {
    "eps": rounds_otherwise,
    "hook": hooks,
    "number": drops_otherwise,
    "failure": fails_later,
}


@contextlib.contextmanager
def counting(found):
    """Counts what a rank asks others about captures, by name."""
    with contextlib.ExitStack() as stack:
        for name in ("meet", "note", "all_noted", "__call__"):
            original = getattr(StoreConsensus, name)

            def counted(self, *args, _name=name, _original=original):
                found[_name] += 1
                return _original(self, *args)

            stack.enter_context(mock.patch.object(StoreConsensus, name, counted))
        yield


def train(mesh, folder, settings, changes, when, without=""):
    """Train; the change of this rank is made, and unmade, before its steps.

    changes: names, of one for each rank, or of one for all. when: by rank, steps at which the
    module is changed, and put back, by turns. without: which rule is left out.
    """
    change = CHANGES[changes[mesh.rank] if isinstance(changes, tuple) else changes]
    run = trainer(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh)
    launch, steps, asked, late = run.executor.train_step, [], Counter(), {}

    def stepping(*args):
        steps.append(None)
        turns = when.get(mesh.rank, ())
        if len(steps) in turns:
            change(run.model.chunks[0], turns.index(len(steps)) % 2 == 0)
        if len(steps) == 4:
            late.update(asked)
        return launch(*args)

    run.executor.train_step = stepping
    owner, name, instead = WITHOUT.get(without, (JointCaptures, "decide", JointCaptures.decide))
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(consensus, "MEETING", 2.0),
        mock.patch.object(owner, name, instead),
        counting(asked),
    ):
        warnings.simplefilter("always", PackgraphWarning)
        run.run(StopRequest())
    held = {
        f"{name} {at}": part.detach().clone()
        for name, value in run.tensors().items()
        for at, part in parts_of(value)
    }
    totals = run.executor.totals()
    dropped = sum((graphed.stats.recaptures for graphed in run.executor.graphed), Counter())
    run.close()
    rows = read_metrics(Path(folder) / METRICS) if mesh.rank == 0 else []
    return {
        "rows": [(row["loss"], row["gradient_norm"]) for row in rows],
        "held": held,
        "asked": Counter(asked) - Counter(late),
        "told": [str(one.message) for one in caught if one.category is PackgraphWarning],
        "recaptures": dict(dropped),
        **totals,
    }


WITHOUT = {
    "meetings": (JointCaptures, "decide", lambda self, wish, what: wish),
    "an order of what is sent": (
        FlatParameters,
        "_is_complete",
        lambda self, number: not self._expected[number],
    ),
}


def both(tmp_path, way, changes, when, without="", **options):
    """The graph runs of both ranks, which have the bits of eager ones."""
    eager, graph = (
        run_ranks(
            train,
            2,
            str(tmp_path / str(on)),
            config(way, graph=on, **options),
            changes,
            when,
            without if on else "",
            layout=WAYS[way].layout(),
            seconds=100.0,
        )
        for on in (False, True)
    )
    for expected, found in zip(eager, graph, strict=True):
        assert expected["rows"] == found["rows"] and expected["held"].keys() == found["held"].keys()
        assert not [
            name
            for name, value in expected["held"].items()
            if not torch.equal(value, found["held"][name])
        ]
    return graph


@pytest.mark.parametrize(
    ("way", "granularity"),
    [
        *((way, "chunk") for way in WAYS),
        ("shard", "layer"),
        *(pytest.param(way, "layer", marks=pytest.mark.slow) for way in ("tp", "cp", "ep")),
    ],
)
def test_a_rank_whose_module_changes_alone_runs_eagerly(tmp_path, way, granularity):
    zero, one = both(tmp_path, way, "eps", {1: (5,)}, granularity=granularity)
    assert set(zero["fallbacks"]) == {"warm-up"} and zero["replayed"] > 6 and not zero["told"]
    assert not zero["asked"]  # a replay asks nobody
    assert (
        one["fallbacks"][APART] > 3
        and one["replayed"] + one["fallbacks"][APART] == (zero["replayed"])
    )
    assert one["captured"] == zero["captured"] and not one["recaptures"]
    (told,) = one["told"]
    assert SHARED in told and "eps" in told and "test_lone" not in told
    assert one["asked"].pop("meet") == 1 and one["asked"].pop("note") == 1
    assert not one["asked"] - Counter(all_noted=one["fallbacks"][APART] // 16 + 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_changes_on_all_ranks_is_captured_again_by_all(tmp_path, way):
    """The change is one of the numbers."""
    for run in both(tmp_path, way, "number", {0: (5,), 1: (5,)}):
        assert set(run["fallbacks"]) == {"warm-up"} and run["replayed"] > 6
        assert run["captured"] == 2 and run["recaptures"] == {"module changed": 1}
        # To begin, of the capture, of the comparison with a plain call, and whether that was equal.
        assert run["asked"] == Counter({"meet": 1, "__call__": 4})


@pytest.mark.parametrize("change", ["eps", "hook"])
def test_what_is_put_back_replays_again(tmp_path, change):
    zero, one = both(tmp_path, "shard", change, {1: (5, 7)})
    print(one["fallbacks"], one["told"])
    assert set(zero["fallbacks"]) == {"warm-up"}
    eager = sum(one["fallbacks"].values()) - one["fallbacks"]["warm-up"]
    assert one["captured"] == 1 and 3 < eager < zero["replayed"] - 6
    assert one["replayed"] + eager == zero["replayed"]


@pytest.mark.parametrize("way", ["tp", "shard"])
def test_ranks_that_change_one_after_another_capture_together_at_last(tmp_path, way):
    found = both(tmp_path, way, "eps", {0: (3,), 1: (4,)}, steps=14)
    for run in found:
        assert run["fallbacks"][APART] > 3 and run["captured"] == 2
        assert run["recaptures"] == {"module changed": 1} and run["replayed"] > 6
        assert len([text for text in run["told"] if SHARED in text]) == 1
    assert found[0]["replayed"] != found[1]["replayed"]


def test_a_capture_that_fails_on_one_rank_then_fails_on_all(tmp_path):
    zero, one = both(tmp_path, "tp", ("eps", "failure"), {0: (5,), 1: (5,)})
    for run in (zero, one):
        assert set(run["fallbacks"]) == {"warm-up", "capture failed"}
        assert run["fallbacks"]["capture failed"] > 6 and run["replayed"] > 3
    assert any("on rank 1, which shares" in text for text in zero["told"])
    assert any("out of room" in text for text in one["told"])


def test_a_rank_that_cannot_capture_ahead_makes_all_run_eagerly(tmp_path):
    """It has a hook before the first capture; when that is gone, all capture."""
    zero, one = both(tmp_path, "tp", "hook", {1: (2, 4)}, steps=12)
    for run in (zero, one):
        assert run["captured"] == 1 and run["replayed"] > 6
    assert any("could not be captured on rank 1" in text for text in zero["told"])


@pytest.mark.parametrize(
    ("without", "way"), [("meetings", "tp"), ("an order of what is sent", "shard")]
)
def test_without_a_rule_ranks_exchange_what_does_not_fit(tmp_path, without, way):
    """Negative controls."""
    with pytest.raises(RankFailed):
        both(tmp_path, way, "eps", {1: (5,)}, without)


def test_whole_steps_of_ranks_that_exchange_data(tmp_path):
    zero, one = both(tmp_path, "tp", "eps", {1: (5,)}, granularity="step")
    assert zero["replayed"] == STEPS - 2 and zero["captured"] == one["captured"]
    assert one["fallbacks"][APART] > 3
    assert any("has changed since all ranks captured" in text for text in one["told"])


def test_a_verdict_is_one_of_all_wishes():
    assert verdict([(CAPTURE, "a"), (CAPTURE, "a")]) == CAPTURE
    assert verdict([(CAPTURE, "a"), (START_OVER, "a")]) == START_OVER
    assert verdict([(CAPTURE, "a"), (CAPTURE, "b")]) == EAGER
    assert verdict([(START_OVER, "a"), (CAPTURE, "b")]) == EAGER


def meetings(mesh):
    """Verdicts of ranks of which the last comes too late to the second place."""
    asks = StoreConsensus("test", range(mesh.world))
    found = [asks.join(), asks.meet("first", (CAPTURE, "it"))]
    with mock.patch.object(consensus, "MEETING", 0.5):
        if mesh.rank == mesh.world - 1:
            torch.distributed.barrier()
        found.append(asks.meet("second", (START_OVER, "it")))
        found.append(asks.all_noted("late"))
        if mesh.rank < mesh.world - 1:
            torch.distributed.barrier()
    torch.distributed.barrier()
    asks.note("late")
    torch.distributed.barrier()
    found += [asks.all_noted("late"), asks.meet("third", (CAPTURE, str(mesh.rank // 2)))]
    wish = START_OVER if mesh.rank == 1 else CAPTURE
    return [*found, asks.meet("fourth", (wish, "it"))]


def test_nobody_waits_for_ever_and_all_ranks_hear_one_verdict():
    for found in run_ranks(meetings, 3, layout=Layout(dp=3)):
        assert found == ["module 1", CAPTURE, EAGER, False, True, EAGER, START_OVER]


class Scaled(nn.Linear):
    """Reads a number whose type may change, which changes no result."""

    factor: float = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


class Layers(nn.Module):
    """Layers in stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(32, 32) for _ in range(4))

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [
            packgraph.Stage("layer", number, functools.partial(run_layer, layer))
            for number, layer in enumerate(self.layers)
        ]

    def end(self, state):
        return state["x"]


def run_layer(layer, state):
    return {**state, "x": layer(state["x"]).relu()}


def own_loop(mesh, lone):
    """Losses of an own loop with sharded layers; rank 1 alone changes before the ninth step."""
    torch.manual_seed(0)
    module = Layers()
    shards = packgraph.shard(module)
    graphed = packgraph.graph(module, warmup=2)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=1e-3)
    trace = []
    with mock.patch.object(consensus, "MEETING", 1.0):
        for step in range(20):
            if lone and mesh.rank == 1 and step == 8:
                module.layers[0].factor = 1
            loss = graphed(torch.full((8, 32), 0.1 * (step + mesh.rank))).square().mean()
            loss.backward()
            norm = shards.step(optimizer)
            trace.append({"loss": loss.detach().clone(), "norm": norm.clone()})
    return trace, graphed.stats.replayed, dict(graphed.stats.fallbacks)


def test_own_loops_over_sharded_layers():
    plain, lone = (run_ranks(own_loop, 2, on, layout=Layout(dp=2)) for on in (False, True))
    for (expected, *_), (found, *_) in zip(plain, lone, strict=True):
        assert not differences(expected, found)
    assert [replayed for _, replayed, _ in lone] == [18, 6]
    assert lone[1][2] == {"warm-up": 2, APART: 12}


class Summing(nn.Module):
    """Sums over ranks by a collective of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x):
        out = self.linear(x) * self.factor
        return (out * all_reduce(out.detach(), "sum", torch.distributed.group.WORLD)).sum()


def own_collectives(mesh):
    """Losses and gradients of eager calls and of graphs; the module changes before the fifth."""
    torch.manual_seed(mesh.rank)
    module = Summing()
    eager, graphed = copy.deepcopy(module), packgraph.graph(module, warmup=1)
    found = [], []
    for number in range(9):
        for model, trace in zip((eager, graphed), found, strict=True):
            model.factor = 1.0 if number < 4 else 0.5
            loss = model(torch.full((3, 4), number + mesh.rank + 1.0))
            loss.backward()
            trace.append({"loss": loss.detach().clone(), "grad": model.linear.weight.grad.clone()})
    return differences(*found), graphed.stats.replayed, graphed.stats.captured


def test_own_collectives_are_captured_again_where_all_ranks_change():
    for different, replayed, captured in run_ranks(own_collectives, 2, layout=Layout(dp=2)):
        assert not different and replayed == 8 and captured == 2
