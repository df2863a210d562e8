"""A further kind of parallelism is one file (tests/helpers/toyaxis.py) and one line in a list:
mesh, validation, build, gradients, checkpoints and verify take it."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import CPU, run_ranks
from toyaxis import ToyOptions, ToyParallelism
from trainkit import RandomPacks, tiny, trainer

from packgraph.parallel.layout import Axis, Layout
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.parallelisms import PARALLELISMS
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer
from packgraph.train.validate import validate
from packgraph.verification.matrix import budget_over, random_packs, tiny_config
from packgraph.verification.ranks import verify_ranks


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(
        "packgraph.train.parallelisms.PARALLELISMS", listed := [*PARALLELISMS, ToyParallelism()]
    )
    for user in ("validate", "build"):
        monkeypatch.setattr(f"packgraph.train.{user}.PARALLELISMS", listed)


def spread(parallel, steps=4, **model):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(made.model, dropout=0.0, **model)
    # The last step of a part of a run is not the last step of the run.
    optimizer = dataclasses.replace(made.optimizer, decay_steps=20)
    return dataclasses.replace(made, model=model, optimizer=optimizer, parallel=parallel)


def test_the_mesh_has_the_axis_and_sums_gradients_over_it():
    layout = ToyOptions(toy=2, tp=2, ep=2).layout().resolved(8)
    assert [axis.name for axis in layout.axes] == ["dp", "toy", "pp", "cp", "tp"]
    assert (layout.dp, layout.replicas(8)) == (2, 4)
    assert layout.replica_ranks() == {
        "copies": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "expert_copies": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    meshes = [Mesh(layout, rank, layout.coordinates(rank), None) for rank in range(8)]
    # Replicas along dp follow each other: two of them share experts, and so a round of packs.
    assert [mesh.replica for mesh in meshes] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [mesh.tells_loss for mesh in meshes] == [True, False] * 4
    assert meshes[0].size("copies") == 4 and meshes[0].size("expert_copies") == 2


def test_an_axis_whose_gradient_norm_is_not_known_is_refused():
    (problem,) = Layout(more=(Axis("toy", 2),)).problems(2)
    assert "toy: ranks of a further axis need packs or rows of their own" in problem


def test_all_its_reasons_are_given_with_those_of_others(toy):
    found = validate(spread(ToyOptions(toy=2, tp=3, dp=1)), "cpu", world=4)
    assert any("dp 1 x toy 2 x pp 1 x cp 1 x tp 3 needs 6 processes, but 4" in p for p in found)
    assert "parallel.toy = 2 is not known with tp" in found
    assert any("needs num_heads to be a multiple" in problem for problem in found)
    assert not validate(spread(ToyOptions(toy=2)), "cpu", world=2)
    assert any("cannot serve 2 replicas" in problem for problem in validate(whole_step(), "cpu"))


def whole_step():
    config = spread(ToyOptions(toy=2))
    graph = dataclasses.replace(config.graph, granularity="step", optimizer=True)
    return dataclasses.replace(config, graph=graph)


def go(mesh, folder, settings, resume):
    """Train, from the start or the newest checkpoint; losses and all tensors at last."""
    made = trainer(Path(folder), settings, RandomPacks())
    made.close()
    with contextlib.closing(
        Trainer(settings, Path(folder), RandomPacks(), CPU, made.view, mesh)
    ) as run:
        if resume:
            run.resume()
        summary = run.run(StopRequest())
        ranks = [getattr(model, "toy_ranks", 0) for model in run.model.chunks]
        found = {name: value.clone() for name, value in collect(run.mesh, run.tensors())}
        return summary["loss_last"], found, ranks, summary["replayed"]


def over(parallel, folder, steps, resume=False):
    settings = spread(parallel, steps)
    layout = parallel.layout()
    return run_ranks(go, 2, str(folder), settings, resume, layout=layout, seconds=200.0)[0]


def test_it_trains_as_replicas_do_and_its_checkpoints_know_no_layout(toy, tmp_path):
    """As many steps along dp give the same bits; the second half of each run is the other's."""
    axis, plain = ToyOptions(dp=1, toy=2), ParallelConfig(dp=2)
    loss, found, ranks, replayed = over(axis, tmp_path / "toy", 3)
    expected_loss, expected, _, _ = over(plain, tmp_path / "plain", 3)
    assert ranks == [2] and replayed and loss == expected_loss
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    _, found, *_ = over(axis, tmp_path / "plain", 5, resume=True)
    _, expected, *_ = over(plain, tmp_path / "toy", 5, resume=True)
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def verified(mesh, settings, broken):
    if broken:  # each rank goes on with the gradients of its own packs
        Optimizer.update = torch.no_grad()(  # type: ignore[method-assign]
            lambda self, loss=None, then=Optimizer.update: (_alone(self), then(self, loss))[1]
        )
    packs, budget = (lambda: random_packs(seed=1)), budget_over(2)
    report = verify_ranks("toy", settings, packs, CPU, mesh, budget=budget)
    return report.good, report.one_process is not None and report.one_process.good


def _alone(optimizer):
    for span in optimizer.flat.spans:
        span.gradients.mul_(1.0 if optimizer.flat.group is None else 0.5)


@pytest.mark.parametrize("broken", [False, True])
def test_verify_holds_it_against_one_process(toy, broken):
    parallel = ToyOptions(dp=1, toy=2)
    settings = dataclasses.replace(tiny_config("layer", 0.0, 5), parallel=parallel)
    results = run_ranks(verified, 2, settings, broken, layout=parallel.layout(), seconds=200.0)
    assert results == [(not broken, not broken)] * 2
