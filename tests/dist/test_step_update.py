"""A whole step with its update as one graph on tensor parallel ranks: collectives of model and norm
are in it too."""

import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

TP2 = Layout(dp=1, tp=2)


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
