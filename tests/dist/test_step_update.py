"""A whole step with its update as one graph on several ranks: collectives of model, reduction and
norm are in it too, and all ranks capture or none."""

import dataclasses
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from trainkit import PacksOfOneCapacity, finished, held_tensors, tiny, trainer

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.fallback import APART
from packgraph.models.config import ExpertConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

TP2 = Layout(dp=1, tp=2)
DP2 = Layout(dp=2)
STEPS = 8


def train(mesh, folder, settings):
    with finished(Path(folder), settings, mesh=mesh) as run:
        return held_tensors(run), run.executor.totals()


def test_tensor_parallel_steps_with_the_update_inside_equal_eager_ones_bitwise(tmp_path):
    made = tiny(graph=True, steps=8, checkpoint_every=100)
    results = {}
    for enabled in (False, True):
        settings = dataclasses.replace(
            made,
            parallel=ParallelConfig(dp=1, tp=2),
            model=dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, vocab_size=33),
            graph=dataclasses.replace(
                made.graph, enabled=enabled, granularity="step", optimizer=True, strict=True
            ),
            optimizer=dataclasses.replace(made.optimizer, clip_norm=0.3),
        )
        results[enabled] = run_ranks(train, 2, str(tmp_path / str(enabled)), settings, layout=TP2)
    rows = [read_metrics(tmp_path / str(enabled) / METRICS) for enabled in (False, True)]
    assert [(a["loss"], a["gradient_norm"]) for a in rows[0]] == [
        (b["loss"], b["gradient_norm"]) for b in rows[1]
    ]
    for (eager, _), (graph, totals) in zip(results[False], results[True], strict=True):
        assert not [name for name in eager if not torch.equal(eager[name], graph[name])]
        assert totals["replayed"] == 6 and totals["fallbacks"] == {
            "warm-up": totals["fallbacks"]["warm-up"]
        }


def config(optimizer="adamw", *, graph=None, steps=STEPS, experts=False, shard="none", **run):
    made = tiny(graph=True, steps=steps, checkpoint_every=100, **run)
    shape = dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, hidden_size=32)
    if experts:
        shape = dataclasses.replace(
            shape, experts=ExpertConfig(count=4, per_token=2, intermediate_size=24)
        )
    options = {"granularity": "step", "optimizer": True, "strict": True} | (graph or {})
    return dataclasses.replace(
        made,
        model=shape,
        parallel=ParallelConfig(dp=2, shard=shard),
        graph=dataclasses.replace(made.graph, **options),
        optimizer=dataclasses.replace(
            made.optimizer, name=optimizer, clip_norm=0.3, decay_steps=20
        ),
    )


def equal_runs(tmp_path, one, other, replayed, layout=DP2):
    """Train by two configs; all tensors of all ranks, losses and norms are the same bits."""
    results, rows = [], []
    for name, settings in (("one", one), ("other", other)):
        found = run_ranks(
            train, layout.dp * layout.inner, str(tmp_path / name), settings, layout=layout
        )
        results.append(found)
        rows.append(read_metrics(tmp_path / name / METRICS))
    figures = [[(row["loss"], row["gradient_norm"]) for row in found] for found in rows]
    assert len(figures[0]) == one.run.steps and figures[0] == figures[1]
    for (expected, _), (found, totals) in zip(*results, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], found[name])]
        assert totals["replayed"] == replayed or (replayed is None and totals["replayed"] > 3)
    return results[1]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param("adamw", {}, marks=pytest.mark.core),
        ("adamw", {"on_spike": "skip"}),
        ("adamw", {"experts": True}),
        ("adamw8bit", {}),
        ("adafactor", {}),
    ],
    ids=str,
)
def test_steps_of_replicas_equal_eager_ones_bitwise(tmp_path, optimizer, options):
    """Steps have different numbers of microbatches, some of them empty."""
    eager = config(optimizer, graph={"enabled": False}, **options)
    found = equal_runs(tmp_path, eager, config(optimizer, **options), STEPS - 2)
    for _, totals in found:
        assert set(totals["fallbacks"]) == {"warm-up"}


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_replicas_of_tensor_parallel_ranks_equal_eager_ones_bitwise(tmp_path, shard):
    parallel = ParallelConfig(dp=2, tp=2, shard=shard)
    model = dataclasses.replace(config().model, vocab_size=33)
    eager, graph = (
        dataclasses.replace(config(graph={"enabled": on}, steps=6), parallel=parallel, model=model)
        for on in (False, True)
    )
    equal_runs(tmp_path, eager, graph, 4, Layout(dp=2, tp=2))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(dp=1, cp=2), {"shard": "parameters"}),
        (Layout(dp=2, ep=2), {}),
        (Layout(dp=2, ep=2), {"shard": "parameters"}),
        pytest.param(Layout(dp=2, cp=2), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_contexts_and_shared_experts_equal_eager_ones_bitwise(tmp_path, layout, options):
    """With experts an update without room changes nothing, and its step is made again."""
    parallel = ParallelConfig(dp=layout.dp, cp=layout.cp, ep=layout.ep, **options)
    eager, graph = (
        dataclasses.replace(
            config(graph={"enabled": on}, steps=6, experts=layout.ep > 1), parallel=parallel
        )
        for on in (False, True)
    )
    assert not validate(graph, "cpu", world=layout.dp * layout.cp)
    equal_runs(tmp_path, eager, graph, None, layout)


def one_capacity(settings):
    """Then replicas share packs out in the same way, whether a graph holds the update or not."""
    graph = dataclasses.replace(settings.graph, capacities=(Capacity(64, 8),))
    model = dataclasses.replace(settings.model, dropout=0.0)  # empty microbatches draw, too
    return dataclasses.replace(settings, graph=graph, model=model)


def train_alike(mesh, folder, settings):
    """As `train_beside`. Packs count as equally long: only where replicas run in rounds does that
    decide who gets which."""
    with mock.patch.object(PackedBatch, "num_pairs", 0):
        return train_beside(mesh, folder, settings)


def train_beside(mesh, folder, settings):
    """Losses and norms of every step, and all tensors at last."""
    with finished(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh) as run:
        rows = read_metrics(Path(folder) / METRICS) if mesh.rank == 0 else []
        held = held_tensors(run)
        return [(row["loss"], row["gradient_norm"]) for row in rows], held, run.executor.totals()


def test_the_reduction_in_the_graph_has_the_bits_of_one_behind_graphs(tmp_path):
    """Against `graph.optimizer = false`: chunks are captured, reduction and update are not."""
    inside = one_capacity(config(tokens_per_step=150))
    behind = one_capacity(
        config(graph={"optimizer": False, "granularity": "chunk"}, tokens_per_step=150)
    )
    results = [
        run_ranks(train_alike, 2, str(tmp_path / name), settings, layout=DP2)
        for name, settings in (("behind", behind), ("inside", inside))
    ]
    for (rows, tensors, totals), (others, found, whole) in zip(*results, strict=True):
        assert rows == others
        assert not [name for name in tensors if not torch.equal(tensors[name], found[name])]
        assert whole["replayed"] == STEPS - 2 and totals["replayed"] > STEPS - 2


def resumed(mesh, folder, settings):
    """All tensors of this rank, after a run that went on from a checkpoint."""
    with finished(Path(folder), settings, mesh=mesh, resume=True) as run:
        return held_tensors(run), run.executor.totals()


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_run_goes_on_bitwise(tmp_path, shard):
    whole = run_ranks(train, 2, str(tmp_path / "whole"), config(shard=shard), layout=DP2)
    first = config(steps=4, shard=shard)
    run_ranks(train, 2, str(tmp_path / "cut"), first, layout=DP2)
    again = config(resume=True, shard=shard)
    on = run_ranks(resumed, 2, str(tmp_path / "cut"), again, layout=DP2)
    for (expected, _), (found, totals) in zip(whole, on, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], found[name])]
        assert totals["replayed"] == 2  # behind a warm-up of its own


def train_spoilt(mesh, folder, settings, what):
    """As `train`; rank 1 alone cannot capture, or changes its module or hooks it after step 4."""
    run = trainer(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh)
    model, zero_grad = run.model.chunks[0], run.optimizer.zero_grad

    def waits():
        zero_grad()
        assert float(run.optimizer.learning_rate) > 0  # refused in a capture

    if mesh.rank == 1 and what == "sync":
        run.optimizer.zero_grad = waits
    launch, steps = run.executor.train_step, []

    def counted(*args):
        steps.append(None)
        if mesh.rank == 1 and len(steps) == 5:
            if what == "change":
                model.norm.eps *= 1.0000001  # lost in the sum with squares: the same numbers
            elif what == "hook":
                model.norm.register_forward_pre_hook(lambda *_: None)
        return launch(*args)

    run.executor.train_step = counted
    with warnings.catch_warnings(record=True, action="always", category=PackgraphWarning) as caught:
        run.run(StopRequest())
    held = held_tensors(run)
    totals, stats = run.executor.totals(), run.executor.step_stats
    whole = stats.replayed, sum(stats.fallbacks.values())
    run.close()
    told = [str(one.message) for one in caught if issubclass(one.category, PackgraphWarning)]
    return held, totals, told, whole


def spoilt(tmp_path, what, shard="none"):
    """What is the same as eagerly, and the runs of both ranks."""
    eager = one_capacity(config(graph={"enabled": False}, shard=shard))
    graph = one_capacity(config(graph={"strict": False}, shard=shard))
    expected = run_ranks(train_beside, 2, str(tmp_path / "eager"), eager, layout=DP2)
    found = run_ranks(train_spoilt, 2, str(tmp_path / "graph"), graph, what, layout=DP2)
    for (_, tensors, _), (others, *_) in zip(expected, found, strict=True):
        assert not [name for name in tensors if not torch.equal(tensors[name], others[name])]
    return found


def test_a_rank_that_cannot_capture_makes_all_run_eagerly(tmp_path):
    """Negative control: without the meeting the other rank would wait in the reduction."""
    (_, _, others, zero), (_, _, own, one) = spoilt(tmp_path, "sync")
    assert zero == one == (0, STEPS - 2)
    assert any("on rank 1" in text for text in others) and own


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_a_rank_whose_module_changes_runs_eagerly_beside_replays(tmp_path, shard):
    """Sharded layers: both must exchange the same parts in one order."""
    (_, _, _, zero), (_, _, told, one) = spoilt(tmp_path, "change", shard)
    assert zero == (STEPS - 2, 0) and one[0] > 0 and one[1] > 0 and sum(one) == STEPS - 2
    assert any("has changed since all ranks captured" in text for text in told)


def test_a_hook_on_one_rank_runs_at_every_step_and_no_other_rank_waits(tmp_path):
    """What the other rank captured before replays on; what it would capture now runs eagerly."""
    (_, _, _, zero), (_, _, told, one) = spoilt(tmp_path, "hook")
    assert one[0] == 2 and sum(one) == sum(zero) == STEPS - 2 and zero[0] >= one[0]
    assert any("has changed since all ranks captured" in text for text in told)


def test_a_rank_that_cannot_exchange_what_others_capture_makes_all_run_eagerly(tmp_path):
    """Steps that are new, of sharded layers: no rank captures them, or their microbatches."""
    (_, totals, told, zero), (_, others, _, one) = spoilt(tmp_path, "hook", "parameters")
    assert one[0] == 2 and sum(one) == sum(zero) == STEPS - 2 and zero[0] >= one[0]
    assert APART in totals["fallbacks"] and "module hooks" in others["fallbacks"]
    assert any("ranks capture together" in text for text in told)


def test_what_replicas_cannot_have_in_a_graph_is_said_at_once():
    made = config()
    experts = dataclasses.replace(
        made.model, experts=ExpertConfig(count=4, per_token=2, intermediate_size=24)
    )
    asked = dataclasses.replace(
        made,
        model=experts,
        parallel=ParallelConfig(ep=2, dp=2),
        optimizer=dataclasses.replace(made.optimizer, name="muon", offload=True),
    )
    text = "\n".join(validate(asked, "cpu", world=2))
    assert "optimizer.offload with graph.optimizer is not there yet" in text
    assert "muon cannot serve" in text
    assert not validate(config(), "cpu", world=2)
    assert not validate(config(shard="parameters"), "cpu", world=2)
    whole = config(shard="gradients", graph={"optimizer": False})
    assert "without graph.optimizer; leave" in "\n".join(validate(whole, "cpu", world=2))
    contexts = dataclasses.replace(made, parallel=ParallelConfig(dp=2, cp=2))
    assert not validate(contexts, "cpu", world=4)
    shared = ParallelConfig(ep=2, expert_stash=4, dispatcher="symmetric")
    other = dataclasses.replace(made, model=experts, parallel=shared)
    text = "parallel.expert_stash and parallel.dispatcher = symmetric: leave one of them out"
    assert text in "\n".join(validate(other, "cpu", world=2))
