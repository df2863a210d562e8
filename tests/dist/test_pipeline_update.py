"""A pipeline's step with its update as one graph on each rank: microbatches, transfers between
stages, reduction, norm and update are in it, on all ranks or on none."""

import contextlib
import dataclasses
import functools
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distkit import RankFailed, run_ranks
from trainkit import CPU, PacksOfOneCapacity, held_tensors, tiny, trainer

import packgraph
from packgraph.graphs import capture as capture_module
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.step import own
from packgraph.models.config import ExpertConfig
from packgraph.models.layers.mlp import RMSNorm
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links
from packgraph.parallel.ranks import replica_consensus, stage_consensus
from packgraph.train.config.sections import OffloadConfig, ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.random_state import random_states
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

PP2, DP2_PP2 = Layout(dp=1, pp=2), Layout(dp=2, pp=2)
STEPS = 9
# Many spans, few of which hold parameters of several chunks.
SMALL = functools.partial(FlatParameters, span_bytes=4096)
EAGER = {"enabled": False}
BEHIND = {"optimizer": False, "granularity": "chunk"}  # graphs of chunks, and the update after them


def config(layout=PP2, *, graph=None, model=None, steps=STEPS, run=None, **other):
    """other: of `ParallelConfig`, and the optimizer's name."""
    made = tiny(graph=True, steps=steps, checkpoint_every=100, **(run or {}))
    name = other.pop("optimizer", "adamw")
    options = {"granularity": "step", "optimizer": True, "strict": True} | (graph or {})
    chunks = other.get("chunks", 1)
    shape = {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 32, "vocab_size": 36}
    return dataclasses.replace(
        made,
        model=dataclasses.replace(
            made.model, **(shape | {"num_layers": 2 * chunks} | (model or {}))
        ),
        parallel=ParallelConfig(
            dp=layout.dp, pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep, **other
        ),
        graph=dataclasses.replace(made.graph, **options),
        optimizer=dataclasses.replace(made.optimizer, name=name, clip_norm=0.3, decay_steps=20),
    )


def steps_of(run, change=lambda step: None):
    """Count steps, and poison the memory of whole steps behind each. change: called with the number
    of every step before it; what it returns is open around it."""
    launch, steps = run.executor.train_step, []

    def counted(*args):
        steps.append(None)
        with change(len(steps)) or contextlib.nullcontext():
            made = launch(*args)
        whole = getattr(run.executor, "_pipeline", None)
        if whole is not None and whole.whole is not None:
            whole.whole._slot.poison()
        return made

    run.executor.train_step = counted


def facts_of(run, folder, mesh):
    """Losses and norms of all steps, tensors and random states; captured steps, and replays and
    fallbacks of steps."""
    rows = read_metrics(Path(folder) / METRICS) if mesh.rank == 0 else []
    held = held_tensors(run)
    held |= {f"random.{name}": value.clone() for name, value in random_states(CPU).items()}
    whole = run.executor.step_stats
    counts = (0, {}) if whole is None else (whole.replayed, dict(whole.fallbacks))
    captured = 0 if whole is None else whole.captured
    return [(row["loss"], row["gradient_norm"]) for row in rows], held, captured, counts


def train(mesh, folder, settings, alike=False, resume=False, late=True):
    packs = PacksOfOneCapacity() if alike else None
    with mock.patch("packgraph.train.optimizer.FlatParameters", SMALL):
        run = trainer(Path(folder), settings, packs, mesh=mesh)
    if settings.graph.enabled and late:
        run.executor.copy_streams(0).queues.late.add("transfers")
    steps_of(run)
    try:
        if resume:
            run.resume()
        # Where replicas run in rounds, packs are dealt out by their pairs: as if all had as many.
        equal = mock.patch.object(PackedBatch, "num_pairs", 0)
        with equal if alike else contextlib.nullcontext():
            run.run(StopRequest())
        return facts_of(run, folder, mesh)
    finally:
        run.close()


def ranks(layout, *arguments, function=train, seconds=120.0):
    world = layout.dp * layout.pp * layout.tp * layout.cp
    return run_ranks(function, world, *arguments, layout=layout, seconds=seconds)


def differing(left, right):
    """Ranks and names of what is not the same in two runs."""
    return [
        (rank, name)
        for rank, ((rows, tensors, *_), (others, found, *_)) in enumerate(
            zip(left, right, strict=True)
        )
        for name in ("losses and norms", *tensors)
        if (rows != others if name == "losses and norms" else
            not torch.equal(tensors[name], found[name]))
    ]  # fmt: skip


def equal_runs(tmp_path, layout, one, other, alike=False):
    """Train by two configs; all is the same bits on all ranks, and the second one replays."""
    expected = ranks(layout, str(tmp_path / "one"), one, alike)
    found = ranks(layout, str(tmp_path / "other"), other, alike)
    assert len(expected[0][0]) == one.run.steps and not differing(expected, found)
    for *_, (replayed, fallbacks) in found:
        assert replayed == one.run.steps - 2 and not fallbacks
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.core),
        {"chunks": 2},
        {"run": {"on_spike": "skip"}, "model": {"tie_embeddings": False}},
        {"run": {"dtype": "bfloat16"}, "optimizer": "adamw8bit"},
        pytest.param({"run": {"recompute": "full"}}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_equal_those_with_the_update_behind_graphs_bitwise(tmp_path, options):
    """Of changing documents, shapes and numbers of microbatches; receives come as late as they
    may, and nothing of a step is left for the next one."""
    equal_runs(tmp_path, PP2, config(graph=BEHIND, **options), config(**options))


def test_few_graphs_replay_many_steps(tmp_path):
    settings = config(steps=14, run={"tokens_per_step": 100})
    behind = config(graph=BEHIND, steps=14, run={"tokens_per_step": 100})
    for _, _, captured, (replayed, _) in equal_runs(tmp_path, PP2, behind, settings, alike=True):
        assert captured <= 4 and replayed == 12  # each of them several times


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_steps_of_replicas_equal_eager_ones_bitwise(tmp_path, shard):
    """Steps have different numbers of microbatches, some of them empty."""
    eager = config(DP2_PP2, graph=EAGER, shard=shard, steps=6)
    equal_runs(tmp_path, DP2_PP2, eager, config(DP2_PP2, shard=shard, steps=6))


def test_replicas_of_a_pipeline_reduce_in_the_graph_as_behind_graphs(tmp_path):
    """Against `graph.optimizer = false`; of one capacity, with which packs are shared out in one
    way, and without dropout, since empty microbatches draw, too."""
    options = {
        "model": {"dropout": 0.0, "num_layers": 4},
        "run": {"tokens_per_step": 150},
        "steps": 6,
        "chunks": 2,
    }
    one = {"capacities": (Capacity(64, 8),)}
    behind = config(DP2_PP2, graph=BEHIND | one, **options)
    equal_runs(tmp_path, DP2_PP2, behind, config(DP2_PP2, graph=one, **options), alike=True)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=1, pp=2, cp=2), {}),
        (Layout(dp=2, pp=2, ep=2), {"experts": True}),
        pytest.param(Layout(dp=1, pp=2, tp=2), {}, marks=pytest.mark.slow),
        pytest.param(DP2_PP2, {"shard": "parameters", "chunks": 2}, marks=pytest.mark.slow),
        pytest.param(Layout(dp=1, pp=4), {"model": {"num_layers": 4}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_ranks_share_beside_stages_equals_eager_steps_bitwise(tmp_path, layout, options):
    options = dict(options)
    if options.pop("experts", False):
        experts = ExpertConfig(count=4, per_token=2, intermediate_size=24)
        options["model"] = {"experts": experts}
    eager, graph = (config(layout, graph=kind, steps=6, **options) for kind in (EAGER, {}))
    assert not validate(graph, "cpu", world=layout.dp * layout.inner)
    expected = ranks(layout, str(tmp_path / "eager"), eager)
    found = ranks(layout, str(tmp_path / "graph"), graph)
    assert not differing(expected, found)
    for *_, (replayed, fallbacks) in found:  # an update without room for experts is made again
        assert replayed >= 4 and not fallbacks


def test_a_run_goes_on_bitwise(tmp_path):
    whole = ranks(PP2, str(tmp_path / "whole"), config(steps=8))
    ranks(PP2, str(tmp_path / "cut"), config(steps=3))
    on = ranks(PP2, str(tmp_path / "cut"), config(steps=8, run={"resume": True}), False, True)
    assert not [difference for difference in differing(whole, on) if "losses" not in difference[1]]
    assert [counts for *_, counts in on] == [(3, {})] * 2  # behind a warm-up of its own


def with_a_sync(function, value):
    """`function`, and then the host waits for the device, which is refused in captures."""

    def waits(*args):
        made = function(*args)
        assert float(value) >= 0
        return made

    return waits


def train_spoilt(mesh, folder, settings, what, silenced=True):
    """As `train`; rank 1 alone cannot capture, or does something else after step 5."""
    with mock.patch("packgraph.train.optimizer.FlatParameters", SMALL):
        run = trainer(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh)
    model, optimizer = run.model.chunks[0], run.optimizer
    if mesh.rank == 1 and what in ("zero_grad", "update"):
        made = with_a_sync(getattr(optimizer, what), optimizer.learning_rate)
        setattr(optimizer, what, made)

    def change(step):
        if what == "everywhere" and step == 5:
            next(each for each in model.modules() if isinstance(each, RMSNorm)).eps *= 1.0000001
        if mesh.rank != 1:
            return None
        if what == "bypass" and step == 5:
            return packgraph.eager("by hand")
        if what == "change" and step == 5:
            model.norm.eps *= 1.0000001  # lost in the sum with squares: the same numbers
        if what == "hook" and step == 5:
            model.norm.register_forward_pre_hook(lambda *_: None)
        return None

    steps_of(run, change)
    run.executor.agree_by(stage_consensus(mesh, 3.0), replica_consensus(mesh, 3.0, updates=True))
    with contextlib.ExitStack() as stack:
        if mesh.rank == 1 and what == "chunk":
            failed = CaptureError("out of room", "model.py:1 in forward", "give it some")
            stack.enter_context(
                mock.patch.object(capture_module, "capture_variant", side_effect=failed)
            )
        if not silenced:
            stack.enter_context(mock.patch.object(Links, "silenced", contextlib.nullcontext))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", PackgraphWarning)
        run.run(StopRequest())
    found = facts_of(run, folder, mesh)
    run.close()
    told = [str(one.message) for one in caught if issubclass(one.category, PackgraphWarning)]
    return *found, told


def spoilt(tmp_path, what):
    """What one rank does alone changes no number; counts and warnings of both ranks."""
    expected = ranks(PP2, str(tmp_path / "eager"), config(graph=BEHIND), True)
    settings = config(graph={"strict": False})
    found = ranks(PP2, str(tmp_path / "graph"), settings, what, function=train_spoilt)
    assert not differing(expected, found)
    return [(counts, told) for *_, counts, told in found]


@pytest.mark.parametrize("what", ["zero_grad", "update"])
def test_a_rank_that_cannot_capture_makes_all_run_by_their_chunks(tmp_path, what):
    """Before its first transfer, and behind its last one."""
    (zero, others), (one, own) = spoilt(tmp_path, what)
    assert zero == one == (0, {"capture failed": STEPS - 2})
    assert any("on rank 1" in text for text in others)
    assert any("reading a number" in text for text in own)


def test_a_rank_whose_chunk_cannot_be_captured_makes_all_run_eagerly(tmp_path):
    """No step has a dry run, then."""
    (zero, others), (one, own) = spoilt(tmp_path, "chunk")
    assert zero == one == (0, {"capture failed": STEPS - 2})
    assert any("out of room" in text for text in own)
    assert not any("cannot be one graph" in text for text in (*others, *own))


def test_dry_runs_with_transfers_would_wait_for_the_rank_that_failed(tmp_path):
    """Negative control: the other one waits in a receive then, and the run has to end."""
    settings = config(graph={"strict": False})
    with pytest.raises(RankFailed, match="did not come to vote on it within 3 s"):
        ranks(
            PP2, str(tmp_path / "graph"), settings, "zero_grad", False, function=train_spoilt
        )  # fmt: skip


@pytest.mark.parametrize("what", ["change", "hook"])
def test_a_rank_whose_module_changes_makes_all_run_by_their_chunks(tmp_path, what):
    """What was captured before, until a graph without it has been captured by all ranks."""
    (zero, _), (one, told) = spoilt(tmp_path, what)
    assert zero[0] == one[0] >= 2 and zero[0] + sum(zero[1].values()) == STEPS - 2
    assert sum(zero[1].values()) == sum(one[1].values()) > 0
    assert zero[1].keys() <= {"another rank runs this step eagerly", "capture failed"}
    assert any("has changed since all ranks captured" in text for text in told) or what == "hook"


def test_a_change_on_all_ranks_is_captured_again_by_all(tmp_path):
    (zero, _), (one, _) = spoilt(tmp_path, "everywhere")
    assert zero == one == (STEPS - 2, {})


def test_a_rank_that_runs_a_step_eagerly_is_not_alone(tmp_path):
    (zero, _), (one, _) = spoilt(tmp_path, "bypass")
    assert zero == (STEPS - 3, {"another rank runs this step eagerly": 1}) and one[0] == STEPS - 3


def test_without_the_agreement_others_would_wait_for_it(tmp_path):
    """Negative control: a step that is new to all is captured by one rank, and the others are not
    at the meeting before it."""
    settings = config(graph={"strict": False})
    alone = mock.patch("packgraph.train.strategies.unanimous", return_value=own)
    with alone, pytest.raises(RankFailed, match="did not finish in time"):
        ranks(
            PP2, str(tmp_path / "g"), settings, "bypass", function=train_spoilt, seconds=25.0
        )  # fmt: skip


class Unwaited:
    """A transfer whose wait is no part of the graph: a replay does not wait."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        type(self.work).wait.__wrapped__(self.work)


def unwaited(direction):
    """`Links.receive`, without waits in captures for what comes in `direction`."""
    receive = Links.receive

    def receives(self, tensor, stage, way):
        made = receive(self, tensor, stage, way)
        is_recorded = hasattr(dist.Work.wait, "__wrapped__") and isinstance(made, dist.Work)
        return Unwaited(made) if way == direction and is_recorded else made

    return mock.patch.object(Links, "receive", receives)


def early(self, output, settled=None, overlap=FlatParameters.overlap):
    overlap(self, output)  # each chunk's last backward is taken for the last one of the step


def reduce_without_waiting(self, reduce=FlatParameters.reduce):
    self._works = []
    reduce(self)


BROKEN = {
    "activations that are waited for": (PP2, unwaited("forward")),
    "gradients that are waited for": (PP2, unwaited("backward")),
    "a reduction that is waited for": (
        DP2_PP2,
        mock.patch.object(FlatParameters, "reduce", reduce_without_waiting),
    ),
    "a reduction that begins when its chunk is done": (
        DP2_PP2,
        mock.patch.object(FlatParameters, "overlap", early),
    ),
}


def train_broken(mesh, folder, settings, what, late):
    """As `train`; graphs are captured without `what`."""
    run_plainly = Pipeline.run_plainly

    def broken(self, *args, is_dry_run):
        with contextlib.nullcontext() if is_dry_run else BROKEN[what][1]:
            return run_plainly(self, *args, is_dry_run=is_dry_run)

    finish = Pipeline.finish

    def finish_broken(self, loss):
        with BROKEN[what][1]:
            return finish(self, loss)

    with (
        mock.patch.object(Pipeline, "run_plainly", broken),
        mock.patch.object(Pipeline, "finish", finish_broken),
    ):
        return train(mesh, folder, settings, late=late)


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_left_out_of_graphs_is_found(tmp_path, what):
    """Negative controls: graphs that do not wait, or begin to reduce too early, are wrong."""
    layout = BROKEN[what][0]
    options = {"steps": 4, "chunks": 2, "run": {"on_spike": "skip"}}
    eager = config(layout, graph=EAGER, **options)
    expected = ranks(layout, str(tmp_path / "eager"), eager)
    graph = config(layout, **options)
    late = "begins" not in what  # a late one would make up for it
    found = ranks(layout, str(tmp_path / "graph"), graph, what, late, function=train_broken)
    assert found[0][-1][0] == 2 and differing(expected, found)


def test_what_a_pipeline_cannot_have_in_a_graph_is_said_at_once():
    assert not validate(config(), "cpu", world=2)
    assert not validate(config(DP2_PP2, shard="parameters"), "cpu", world=4)
    made = config(
        Layout(dp=2, pp=2, ep=2),
        graph={"granularity": "chunk"},
        model={"experts": ExpertConfig(count=4, per_token=2, intermediate_size=24)},
        expert_stash=4,
        dispatcher="symmetric",
    )
    asked = dataclasses.replace(
        made,
        offload=OffloadConfig(modules=("mlp_act",)),
        optimizer=dataclasses.replace(made.optimizer, offload=True),
    )
    text = "\n".join(validate(asked, "cpu", world=4))
    assert (
        "graph.optimizer with parallel.pp = 2 is not there yet with parallel.expert_stash and "
        "parallel.dispatcher = symmetric and offload.modules" in text
    )
    assert "optimizer.offload with graph.optimizer" in text
    assert "graph.granularity = step, not chunk" in text
