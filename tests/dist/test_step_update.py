"""A whole step with its update as one graph on several ranks: collectives of model, reduction and
norm are in it too, and all ranks capture or none."""

import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.models.config import ExpertConfig
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

TP2 = Layout(dp=1, tp=2)
DP2 = Layout(dp=2)
STEPS = 8


def train(mesh, folder, settings):
    run = trainer(Path(folder), settings, mesh=mesh)
    try:
        run.run(StopRequest())
        return {name: _held(value) for name, value in run.tensors().items()}, run.executor.totals()
    finally:
        run.close()


def _held(value):
    if isinstance(value, Pieces):
        return torch.cat([torch.zeros(0), *(piece.detach().flatten() for _, piece in value.pieces)])
    return local_tensor(value.detach()).clone()


@pytest.mark.dist
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


def config(optimizer="adamw", *, graph=None, steps=STEPS, experts=False, **run):
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
        parallel=ParallelConfig(dp=2),
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
            train, layout.dp * layout.tp, str(tmp_path / name), settings, layout=layout
        )
        results.append(found)
        rows.append(read_metrics(tmp_path / name / METRICS))
    figures = [[(row["loss"], row["gradient_norm"]) for row in found] for found in rows]
    assert len(figures[0]) == one.run.steps and figures[0] == figures[1]
    for (expected, _), (found, totals) in zip(*results, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], found[name])]
        assert totals["replayed"] == replayed, totals
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
