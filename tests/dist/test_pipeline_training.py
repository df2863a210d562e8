"""Runs over pipeline stages: graphs equal eager bitwise, stages equal the whole in rounding, checkpoints move."""
import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import RandomPacks, tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.collect import collect
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.checkpoint_reader import CheckpointError
from packgraph.train.options import ParallelConfig, disagreements
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer

pytestmark = pytest.mark.dist


ALONE, PP2, PP2_TP2 = Layout(dp=1), Layout(dp=1, pp=2), Layout(dp=1, pp=2, tp=2)


def config(layout, steps, *, dropout=0.1, chunks=1, layers=2, sequence=True, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(made.model, tie_embeddings=False, num_layers=max(layers, 2 * chunks), dropout=dropout,
                                num_heads=4, num_kv_heads=2, vocab_size=33)
    return dataclasses.replace(
        made, model=model, parallel=ParallelConfig(dp=layout.dp, pp=layout.pp, tp=layout.tp, chunks=chunks,
                                                         sequence=sequence),
        graph=dataclasses.replace(made.graph, **graph),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20))


def go(mesh, folder, settings, resume=False):
    """Run to the end; at last this rank's tensors, its graph counts, and on rank 0 all tensors whole."""
    made = trainer(Path(folder), settings, RandomPacks())
    made.close()
    run = Trainer(settings, Path(folder), RandomPacks(), made.device, made.view, mesh)
    try:
        if resume:
            run.resume()
        run.run(StopRequest())
        held = {name: _held(value) for name, value in run.tensors().items()}
        return held, run.executor.totals(), dict(collect(mesh, run.tensors()))
    finally:
        run.close()


def _held(value):
    """What this rank holds of a tensor."""
    if isinstance(value, Pieces):
        return torch.cat([torch.zeros(0), *(piece.detach().flatten() for _, piece in value.pieces)])
    return local_tensor(value.detach()).clone()


def ranks(layout, *arguments):
    return run_ranks(go, (layout.dp or 1) * layout.pp * layout.tp, *arguments, layout=layout, seconds=120.0)


@pytest.mark.parametrize(("layout", "chunks", "granularities"), [
    (PP2, 1, ("layer", "chunk", "step")), (Layout(dp=2, pp=2), 1, ("layer", "chunk")),
    (PP2, 2, ("layer", "chunk", "step")),
    pytest.param(PP2_TP2, 1, ("layer", "chunk", "step"), marks=pytest.mark.slow)],
    ids=["PP2", "DP2xPP2", "PP2xVPP2", "PP2xTP2"])
def test_every_granularity_equals_the_eager_run_bitwise(layout, chunks, granularities, tmp_path):
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, 20, enabled=False, chunks=chunks))
    for granularity in granularities:
        settings = config(layout, 20, granularity=granularity, chunks=chunks)
        graphs = ranks(layout, str(tmp_path / granularity), settings)
        for (expected, *_), (got, totals, _) in zip(eager, graphs, strict=True):
            assert expected.keys() == got.keys()
            assert not [name for name in got if not torch.equal(expected[name], got[name])]
            assert totals["replayed"] > 0 and set(totals["fallbacks"]) <= {
                "warm-up", "whole step: too many different call signatures"}


def test_a_replica_without_a_pack_waits_for_the_others(tmp_path):
    layout = Layout(dp=2, pp=2)
    settings = config(layout, 4)
    settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, tokens_per_step=1))
    for tensors, totals, _ in ranks(layout, str(tmp_path / "run"), settings):
        assert all(value.isfinite().all() for value in tensors.values())
        assert totals["replayed"] in (0, 2)


@pytest.mark.parametrize(("layout", "sequence"), [(PP2, True), (PP2_TP2, True), (PP2_TP2, False)],
                         ids=["PP2", "PP2xTP2", "PP2xTP2-whole-rows"])
def test_stages_learn_what_the_whole_model_learns(layout, sequence, tmp_path):
    stages = ranks(layout, str(tmp_path / "pp"), config(layout, 8, dropout=0.0, sequence=sequence))
    assert_close(stages, ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 8, dropout=0.0)))


def assert_close(results, alone):
    """Sums over stages and ranks are rounded in another order, and Adam makes much of tiny gradients: hence 1e-4."""
    (_, _, found), (_, _, expected) = results[0], alone[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m)


def test_a_run_moves_from_chunks_to_one_process_and_back(tmp_path):
    folder = str(tmp_path / "moved")
    ranks(PP2, folder, config(PP2, 3, dropout=0.0, chunks=2))
    ranks(ALONE, folder, config(ALONE, 6, dropout=0.0, layers=4), True)
    moved = ranks(PP2, folder, config(PP2, 9, dropout=0.0, chunks=2), True)
    assert_close(moved, ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 9, dropout=0.0, layers=4)))


def test_a_resumed_pipeline_is_bitwise_the_one_that_never_stopped(tmp_path):
    straight = ranks(PP2, str(tmp_path / "straight"), config(PP2, 6, chunks=2))
    ranks(PP2, str(tmp_path / "halves"), config(PP2, 3, chunks=2))
    halves = ranks(PP2, str(tmp_path / "halves"), config(PP2, 6, chunks=2), True)
    for (expected, *_), (got, *_) in zip(straight, halves, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], got[name])]


def fewer_layers(mesh, folder, settings):
    """Ask for a checkpoint of more layers than there are: which rank holds too little is nobody's fault."""
    with pytest.raises(CheckpointError, match=r"layers\.2\.input_layernorm\.weight is not part of this run"):
        go(mesh, folder, settings, True)


def test_a_checkpoint_of_more_layers_is_refused_on_all_ranks(tmp_path):
    folder = str(tmp_path / "run")
    ranks(ALONE, folder, config(ALONE, 3, layers=3))
    run_ranks(fewer_layers, 2, folder, config(PP2, 6), layout=PP2)


def test_what_cannot_be_a_pipeline_is_said_at_once():
    settings = config(Layout(dp=1, pp=4), 4, chunks=2, layers=4, scope=("head",))
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, tie_embeddings=True),
                                   parallel=ParallelConfig(dp=1, pp=4, chunks=2, tp=2))
    text = "\n".join(disagreements(settings, "cpu", world=8))
    assert "parallel.pp = 4 x parallel.chunks = 2 needs at least as many layers, model.num_layers is 4" in text
    assert "tie_embeddings" in text and "head is on the last one only" in text
    assert not disagreements(config(Layout(dp=2, pp=2, tp=2), 4), "cpu", world=8)
    alone = dataclasses.replace(settings, parallel=ParallelConfig(dp=1, chunks=2))
    assert "parallel.chunks = 2 needs parallel.pp" in "\n".join(disagreements(alone, "cpu"))
