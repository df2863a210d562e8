"""Layouts in which ranks are unlike: stages without experts, tensor parallel ranks beside
experts."""

import dataclasses
from pathlib import Path

import pytest
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.models.config import ExpertConfig
from packgraph.parallel.mesh import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

pytestmark = pytest.mark.dist


def config(parallel, first_dense=0, **graph):
    made = tiny(graph=True, steps=4, checkpoint_every=100)
    experts = ExpertConfig(
        count=4,
        per_token=2,
        intermediate_size=16,
        shared=1,
        first_dense=first_dense,
        score_bias=True,
        document_loss=1e-2,
    )
    model = dataclasses.replace(made.model, num_kv_heads=2, dropout=0.0, experts=experts)
    return dataclasses.replace(
        made, model=model, parallel=parallel, graph=dataclasses.replace(made.graph, **graph)
    )


def go(mesh, folder, settings):
    run = trainer(Path(folder), settings, mesh=mesh)
    try:
        run.run(StopRequest())
        return run._repeats.total
    finally:
        run.close()


def losses(folder):
    return [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)]


def test_a_stage_without_experts_agrees_about_the_stash(tmp_path):
    """Only the second stage has pages, but whether an update counts is agreed by all ranks."""
    run_ranks(
        go, 1, str(tmp_path / "one"), config(ParallelConfig(), 1), layout=Layout(dp=1), seconds=60.0
    )
    run_ranks(
        go,
        2,
        str(tmp_path / "two"),
        config(ParallelConfig(pp=2, expert_stash=1.2), 1),
        layout=Layout(dp=1, pp=2),
        seconds=60.0,
    )
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_tensor_parallel_ranks_have_copies_of_experts(tmp_path):
    run_ranks(
        go, 1, str(tmp_path / "one"), config(ParallelConfig()), layout=Layout(dp=1), seconds=60.0
    )
    run_ranks(
        go,
        2,
        str(tmp_path / "two"),
        config(ParallelConfig(tp=2, sequence=False)),
        layout=Layout(dp=1, tp=2),
        seconds=60.0,
    )
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_what_cannot_be_captured_or_split_is_refused_at_once():
    dense_first = validate(config(ParallelConfig(pp=2), 1, scope=("moe_router",)), "cpu", world=2)
    assert any("leaves nothing to capture on parts [0] of" in text for text in dense_first)
    assert not validate(
        config(ParallelConfig(pp=2), 1, scope=("moe_router", "attn")), "cpu", world=2
    )
    rows = validate(config(ParallelConfig(tp=2)), "cpu", world=2)
    assert any("with parallel.sequence is not there yet with experts" in text for text in rows)
    assert not validate(config(ParallelConfig(tp=2, sequence=False)), "cpu", world=2)
