"""Spikes on several ranks: all leave out the same steps or go back together, and stay one run."""

import dataclasses
import math
from pathlib import Path

import pytest
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

LAYOUTS = {
    "dp2": Layout(dp=2),
    "tp2": Layout(dp=1, tp=2),
    "pp2": Layout(dp=1, pp=2),
    "cp2": Layout(dp=1, cp=2),
}


def settings(layout, policy):
    made = tiny(True, steps=28, checkpoint_every=6, on_spike=policy)
    shape = dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, tie_embeddings=False)
    parallel = ParallelConfig(dp=layout.dp, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    return dataclasses.replace(made, model=shape, parallel=parallel)


def trained(mesh, folder, made, factor):
    """Train; the gradients of one step are spoilt on rank 1 alone. Counts, losses, and whether the
    weights are numbers."""
    run = trainer(Path(folder) / "run", made, mesh=mesh)
    reduce = run.optimizer.flat.reduce

    def spoilt():
        reduce()
        if mesh.rank == 1 and 64 <= run.feed.state_dict()["position"] < 67:
            for span in run.optimizer.flat.spans:
                span.own_gradients.mul_(factor)

    run.optimizer.flat.reduce = spoilt
    summary = run.run(StopRequest())
    finite = all(
        bool(local_tensor(parameter).isfinite().all()) for parameter in run.model.parameters()
    )
    run.close()
    return (
        summary["spikes"],
        [row["loss"] for row in read_metrics(Path(folder) / "run" / METRICS)],
        finite,
    )


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy)
        for name in ("dp2", "tp2", "pp2", "cp2")
        for policy in ("skip", "rollback")
    ],
)
def test_all_ranks_decide_alike(tmp_path, name, policy):
    layout = LAYOUTS[name]
    factor = math.nan if policy == "skip" else 1e5
    found = run_ranks(
        trained, 2, str(tmp_path), settings(layout, policy), factor, layout=layout, seconds=120.0
    )
    assert found[0][0] == found[1][0] and found[0][2] and found[1][2]
    assert found[0][0]["skipped" if policy == "skip" else "rolled_back"] >= 1
    losses = [loss for loss in found[0][1] if loss is not None]
    assert len(found[0][1]) == 28 and max(losses) < 10
