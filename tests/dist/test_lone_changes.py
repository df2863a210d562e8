"""Layers and chunks as graphs of ranks that exchange data in them: a module that changes on one rank
alone makes that rank run eagerly, and ranks capture again together or not at all."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import PacksOfOneCapacity, tiny, trainer

from packgraph.graphs.errors import PackgraphWarning
from packgraph.models.config import ExpertConfig
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import parts_of
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

pytestmark = pytest.mark.dist

STEPS = 8
WAYS = {
    "tp": ParallelConfig(dp=1, tp=2),
    "cp": ParallelConfig(dp=1, cp=2),
    "ep": ParallelConfig(dp=2, ep=2),
    "shard": ParallelConfig(dp=2, shard="parameters"),
}


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


def evaluates(model, changed):
    """A norm has no dropout: the numbers are the same."""
    model.norm.train(not changed)


def freezes(model, changed):
    model.norm.weight.requires_grad_(not changed)


def train(mesh, folder, settings, change, when):
    """Train; `change` is made, and unmade, before these steps of this rank.

    when: by rank, steps at which the module is changed, and back, by turns.
    """
    run = trainer(Path(folder), settings, PacksOfOneCapacity(), mesh=mesh)
    launch, steps = run.executor.train_step, []

    def stepping(*args):
        steps.append(None)
        turns = when.get(mesh.rank, ())
        if len(steps) in turns:
            change(run.model.chunks[0], turns.index(len(steps)) % 2 == 0)
        return launch(*args)

    run.executor.train_step = stepping
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PackgraphWarning)
        run.run(StopRequest())
    held = {
        f"{name} {at}": part.detach().clone()
        for name, value in run.tensors().items()
        for at, part in parts_of(value)
    }
    totals = run.executor.totals()
    run.close()
    rows = read_metrics(Path(folder) / METRICS) if mesh.rank == 0 else []
    return {
        "rows": [(row["loss"], row["gradient_norm"]) for row in rows],
        "held": held,
        "totals": totals,
        "told": [str(one.message) for one in caught if one.category is PackgraphWarning],
    }


def compared(tmp_path, way, change, when, **options):
    """The graph runs of both ranks, which have the bits of eager ones."""
    layout = WAYS[way].layout()
    eager, graph = (
        run_ranks(
            train,
            2,
            str(tmp_path / str(on)),
            config(way, graph=on, **options),
            change,
            when,
            layout=layout,
            seconds=100.0,
        )
        for on in (False, True)
    )
    for expected, found in zip(eager, graph, strict=True):
        assert expected["rows"] == found["rows"]
        assert not [
            name
            for name, value in expected["held"].items()
            if not torch.equal(value, found["held"][name])
        ]
    return graph


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_whose_module_changes_alone_runs_eagerly(tmp_path, way, granularity):
    found = compared(tmp_path, way, evaluates, {1: (5,)}, granularity=granularity)
    print([run["totals"] for run in found], [run["told"] for run in found])
    assert 0
