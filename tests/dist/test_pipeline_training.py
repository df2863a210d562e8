"""Runs over pipeline stages: graphs equal eager bitwise, stages equal the whole in rounding,
checkpoints move."""

import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces, collect
from packgraph.train.checkpoint.reader import CheckpointError, read_metadata_file
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

pytestmark = pytest.mark.dist


ALONE, PP2, PP2_TP2 = Layout(dp=1), Layout(dp=1, pp=2), Layout(dp=1, pp=2, tp=2)


def config(layout, steps, *, dropout=0.1, chunks=1, layers=2, sequence=True, tied=False, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(
        made.model,
        tie_embeddings=tied,
        num_layers=max(layers, 2 * chunks),
        dropout=dropout,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=33,
    )
    return dataclasses.replace(
        made,
        model=model,
        parallel=ParallelConfig(
            dp=layout.dp, pp=layout.pp, tp=layout.tp, chunks=chunks, sequence=sequence
        ),
        graph=dataclasses.replace(made.graph, **graph),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings, resume=False):
    """Run to the end; at last this rank's tensors, its graph counts, and on rank 0 all tensors
    whole."""
    run = trainer(Path(folder), settings, mesh=mesh)
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
    return run_ranks(
        go, (layout.dp or 1) * layout.pp * layout.tp, *arguments, layout=layout, seconds=120.0
    )


@pytest.mark.parametrize(
    ("layout", "options", "granularities"),
    [
        (PP2, {}, ("layer", "chunk", "step")),
        (Layout(dp=2, pp=2), {"tied": True}, ("layer", "chunk")),
        (PP2, {"chunks": 2, "tied": True}, ("layer", "chunk", "step")),
        pytest.param(PP2_TP2, {}, ("layer", "chunk", "step"), marks=pytest.mark.slow),
    ],
    ids=["PP2", "DP2xPP2-tied", "PP2xVPP2-tied", "PP2xTP2"],
)
def test_every_granularity_equals_the_eager_run_bitwise(layout, options, granularities, tmp_path):
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, 20, enabled=False, **options))
    for granularity in granularities:
        settings = config(layout, 20, granularity=granularity, **options)
        graphs = ranks(layout, str(tmp_path / granularity), settings)
        for (expected, *_), (got, totals, _) in zip(eager, graphs, strict=True):
            assert expected.keys() == got.keys()
            assert not [name for name in got if not torch.equal(expected[name], got[name])]
            assert totals["replayed"] > 0 and set(totals["fallbacks"]) <= {
                "warm-up",
                "whole step: too many different call signatures",
            }
        assert_copies_are_equal(graphs, layout)


def assert_copies_are_equal(results, layout):
    """What several stages hold of a parameter and of its optimizer state is the same in every
    bit."""
    by_place = {}
    for rank, (tensors, *_) in enumerate(results):
        place = layout.coordinates(rank)
        for name, value in tensors.items():
            by_place.setdefault((name, place["dp"], place["tp"]), []).append(value)
    for (name, *_), copies in by_place.items():
        assert all(torch.equal(copies[0], other) for other in copies[1:]), name


def test_a_replica_without_a_pack_waits_for_the_others(tmp_path):
    layout = Layout(dp=2, pp=2)
    settings = config(layout, 4)
    settings = dataclasses.replace(
        settings, run=dataclasses.replace(settings.run, tokens_per_step=1)
    )
    for tensors, totals, _ in ranks(layout, str(tmp_path / "run"), settings):
        assert all(value.isfinite().all() for value in tensors.values())
        assert totals["replayed"] in (0, 2)


@pytest.mark.parametrize(
    ("layout", "options"),
    [(PP2, {}), (PP2, {"tied": True}), (PP2_TP2, {"tied": True}), (PP2_TP2, {"sequence": False})],
    ids=["PP2", "PP2-tied", "PP2xTP2-tied", "PP2xTP2-whole-rows"],
)
def test_stages_learn_what_the_whole_model_learns(layout, options, tmp_path):
    stages = ranks(layout, str(tmp_path / "pp"), config(layout, 8, dropout=0.0, **options))
    assert_copies_are_equal(stages, layout)
    assert_close(
        stages, ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 8, dropout=0.0, **options))
    )
    for ours, theirs in zip(
        read_metrics(tmp_path / "pp" / METRICS),
        read_metrics(tmp_path / "alone" / METRICS),
        strict=True,
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)


def assert_close(results, alone):
    """Sums over stages and ranks are rounded in another order, and Adam makes much of tiny
    gradients: hence 1e-4."""
    (_, _, found), (_, _, expected) = results[0], alone[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: name + m
        )


def test_a_run_moves_from_chunks_to_one_process_and_back(tmp_path):
    folder = str(tmp_path / "moved")
    ranks(PP2, folder, config(PP2, 3, dropout=0.0, chunks=2, tied=True))
    stored = read_metadata_file(Path(folder) / "checkpoints" / "step-00000003" / ".metadata")
    names = [index.fqn for index in stored.storage_data]
    assert len(names) == len(set(names)) and "optimizer.embed_tokens.weight.exp_avg" in names, (
        "copies are stored once"
    )
    ranks(ALONE, folder, config(ALONE, 6, dropout=0.0, layers=4, tied=True), True)
    moved = ranks(PP2, folder, config(PP2, 9, dropout=0.0, chunks=2, tied=True), True)
    assert_copies_are_equal(moved, PP2)
    assert_close(
        moved,
        ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 9, dropout=0.0, layers=4, tied=True)),
    )


def test_a_resumed_pipeline_is_bitwise_the_one_that_never_stopped(tmp_path):
    straight = ranks(PP2, str(tmp_path / "straight"), config(PP2, 6, chunks=2))
    ranks(PP2, str(tmp_path / "halves"), config(PP2, 3, chunks=2))
    halves = ranks(PP2, str(tmp_path / "halves"), config(PP2, 6, chunks=2), True)
    for (expected, *_), (got, *_) in zip(straight, halves, strict=True):
        assert not [name for name in expected if not torch.equal(expected[name], got[name])]


def fewer_layers(mesh, folder, settings):
    """Ask for a checkpoint of more layers than there are: which rank holds too little is nobody's
    fault."""
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.input_layernorm\.weight is not part of this run"
    ):
        go(mesh, folder, settings, True)


def test_a_checkpoint_of_more_layers_is_refused_on_all_ranks(tmp_path):
    folder = str(tmp_path / "run")
    ranks(ALONE, folder, config(ALONE, 3, layers=3))
    run_ranks(fewer_layers, 2, folder, config(PP2, 6), layout=PP2)


def test_what_cannot_be_a_pipeline_is_said_at_once():
    settings = config(Layout(dp=1, pp=4), 4, chunks=2, layers=4, scope=("head",))
    settings = dataclasses.replace(settings, parallel=ParallelConfig(dp=1, pp=4, chunks=2, tp=2))
    text = "\n".join(validate(settings, "cpu", world=8))
    assert (
        "parallel.pp = 4 x parallel.chunks = 2 needs at least as many layers, model.num_layers is 4"
        in text
    )
    assert "head is on the last one only" in text
    assert not validate(config(Layout(dp=2, pp=2, tp=2), 4), "cpu", world=8)
    alone = dataclasses.replace(settings, parallel=ParallelConfig(dp=1, chunks=2))
    assert "parallel.chunks = 2 needs parallel.pp" in "\n".join(validate(alone, "cpu"))
