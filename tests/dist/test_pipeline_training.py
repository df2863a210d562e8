"""Runs over pipeline stages: graphs equal eager bitwise, stages equal the whole in rounding, checkpoints move."""
import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import RandomPacks, tiny, trainer

from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.options import ParallelConfig, disagreements
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer

pytestmark = pytest.mark.dist


def config(layout, steps, *, dropout=0.1, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(made.model, tie_embeddings=False, num_layers=2, dropout=dropout)
    return dataclasses.replace(
        made, model=model, parallel=ParallelConfig(dp=layout.dp, pp=layout.pp),
        graph=dataclasses.replace(made.graph, **graph),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20))


def go(mesh, folder, settings, resume=False):
    """Run to the end; the tensors and graph counts of this rank at last."""
    made = trainer(Path(folder), settings, RandomPacks())
    made.close()
    run = Trainer(settings, Path(folder), RandomPacks(), made.device, made.view, mesh)
    try:
        if resume:
            run.resume()
        run.run(StopRequest())
        return {name: _held(value) for name, value in run.tensors().items()}, run.executor.totals()
    finally:
        run.close()


def _held(value):
    """What this rank holds of a tensor."""
    if isinstance(value, Pieces):
        return torch.cat([torch.zeros(0), *(piece.detach().flatten() for _, piece in value.pieces)])
    return value.detach().clone()


def ranks(layout, *arguments):
    return run_ranks(go, (layout.dp or 1) * layout.pp, *arguments, layout=layout, seconds=120.0)


def merged(results):
    return {name: value for tensors, _ in results for name, value in tensors.items()}


@pytest.mark.parametrize("layout", [Layout(dp=1, pp=2), Layout(dp=2, pp=2)], ids=["PP2", "DP2xPP2"])
def test_every_granularity_equals_the_eager_run_bitwise(layout, tmp_path):
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, 20, enabled=False))
    for granularity in ("layer", "chunk") if layout.dp == 2 else ("layer", "chunk", "step"):
        settings = config(layout, 20, granularity=granularity)
        graphs = ranks(layout, str(tmp_path / granularity), settings)
        for (expected, _), (got, totals) in zip(eager, graphs, strict=True):
            assert expected.keys() == got.keys()
            assert not [name for name in got if not torch.equal(expected[name], got[name])]
            assert totals["replayed"] > 0 and set(totals["fallbacks"]) <= {
                "warm-up", "whole step: too many different call signatures"}


def test_stages_learn_what_the_whole_model_learns(tmp_path):
    layout, alone = Layout(dp=1, pp=2), Layout(dp=1)
    stages = merged(ranks(layout, str(tmp_path / "pp"), config(layout, 8, dropout=0.0)))
    whole = merged(ranks(alone, str(tmp_path / "alone"), config(alone, 8, dropout=0.0)))
    assert stages.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(stages[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m)


def test_a_run_is_saved_by_two_stages_and_goes_on_alone(tmp_path):
    layout, alone = Layout(dp=1, pp=2), Layout(dp=1)
    folder = str(tmp_path / "moved")
    ranks(layout, folder, config(layout, 4, dropout=0.0))
    moved = merged(ranks(alone, folder, config(alone, 8, dropout=0.0), True))
    straight = merged(ranks(alone, str(tmp_path / "alone"), config(alone, 8, dropout=0.0)))
    for name, value in straight.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m)


def test_what_cannot_be_a_pipeline_is_said_at_once():
    settings = config(Layout(dp=1, pp=4), 4)
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, tie_embeddings=True),
                                   parallel=ParallelConfig(dp=1, pp=4, tp=2))
    text = "\n".join(disagreements(settings, "cpu", world=8))
    assert "at least as many layers" in text and "tie_embeddings" in text and "parallel.tp" in text
