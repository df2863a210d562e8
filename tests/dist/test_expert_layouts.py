"""Layouts in which ranks are unlike: stages without experts, tensor parallel ranks beside
experts, ranks with more pages than others."""

import dataclasses
import functools
from pathlib import Path
from unittest import mock

import pytest
from distkit import CPU, run_ranks
from trainkit import close, equal, finished, tiny

from packgraph.models.config import ExpertConfig
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.features import moe
from packgraph.train.features.moe import set_pages
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.validate import validate
from packgraph.verification.matrix import (
    budget_over,
    config_for,
    random_packs,
    tiny_experts_config,
)
from packgraph.verification.ranks import verify_ranks


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
    with finished(Path(folder), settings, mesh=mesh) as run:
        return run.repeated


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


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_ranks_have_copies_of_experts(sequence, tmp_path):
    """Whether hidden states are split by rows or not: losses and gradient norms of one process."""
    run_ranks(
        go, 1, str(tmp_path / "one"), config(ParallelConfig()), layout=Layout(dp=1), seconds=60.0
    )
    run_ranks(
        go,
        2,
        str(tmp_path / "two"),
        config(ParallelConfig(tp=2, sequence=sequence)),
        layout=Layout(dp=1, tp=2),
        seconds=60.0,
    )
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def tensors(mesh, folder, settings):
    with finished(Path(folder), settings, mesh=mesh) as run:
        return dict(collect(mesh, run.tensors())), run.executor.totals()


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2),
        pytest.param(ParallelConfig(tp=2, dp=2, ep=2, expert_room=4.0), marks=pytest.mark.slow),
        pytest.param(ParallelConfig(tp=2, cp=2), marks=pytest.mark.slow),
    ],
    ids=lambda parallel: str(parallel.layout()),
)
def test_experts_of_rows_that_are_split_are_those_of_one_process(parallel, tmp_path):
    """Every parameter and its optimizer state; graphs equal eager bitwise, with ranks that draw
    their own dropout."""

    def trained(name, parallel, dropout, **graph):
        made = config(parallel, **graph)
        model = dataclasses.replace(made.model, num_heads=4, dropout=dropout)
        made = dataclasses.replace(made, model=model)
        layout = dataclasses.replace(parallel.layout(), dp=parallel.dp or 1)
        world = layout.dp * layout.inner
        folder = str(tmp_path / name)
        return run_ranks(tensors, world, folder, made, layout=layout, seconds=120.0)

    close(trained("split", parallel, 0.0)[0][0], trained("one", ParallelConfig(), 0.0)[0][0])
    expected = trained("eager", parallel, 0.1, enabled=False)[0][0]
    found = trained("graphs", parallel, 0.1, granularity="chunk", strict=True)
    equal(found[0][0], expected)
    assert all(totals["replayed"] > 0 for _, totals in found)


def test_what_cannot_be_captured_or_split_is_refused_at_once():
    dense_first = validate(config(ParallelConfig(pp=2), 1, scope=("moe_router",)), "cpu", world=2)
    assert any("leaves nothing to capture on parts [0] of" in text for text in dense_first)
    assert not validate(
        config(ParallelConfig(pp=2), 1, scope=("moe_router", "attn")), "cpu", world=2
    )
    for sequence in (False, True):
        tensor = config(ParallelConfig(tp=2, sequence=sequence))
        assert not validate(tensor, "cpu", world=2)


def with_few_pages(mesh, layout, granularity, shard):
    """The report of a run whose stash is too small for some steps, and a rank's pages at last."""
    parallel = dataclasses.replace(
        config_for(layout, granularity, 4).parallel, expert_stash=1.2, shard=shard
    )
    made = dataclasses.replace(tiny_experts_config(granularity, 0.1, 4), parallel=parallel)
    made = dataclasses.replace(made, graph=dataclasses.replace(made.graph, strict=True))
    assert not validate(made, "cpu", world=mesh.world)
    pages = []

    def noting(stash, count, blocks):
        pages.append(count)
        return set_pages(stash, count, blocks)

    packs = functools.partial(random_packs, seed=1)
    with mock.patch.object(moe, "set_pages", noting):
        report = verify_ranks("pages", made, packs, CPU, mesh, budget=budget_over(layout.dp))
    return report, pages


@pytest.mark.parametrize(
    ("layout", "granularity", "shard"),
    [
        pytest.param(Layout(dp=2), "chunk", "parameters", marks=pytest.mark.core),
        (Layout(dp=2, ep=2), "layer", "none"),
        (Layout(dp=2), "layer", "gradients"),
        (Layout(dp=2, ep=2), "layer", "parameters"),
        pytest.param(Layout(dp=4, ep=2), "chunk", "parameters", marks=pytest.mark.slow),
        pytest.param(Layout(dp=4, ep=2), "layer", "parameters", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.few(2)
def test_ranks_capture_again_together_where_only_some_get_more_pages(layout, granularity, shard):
    """A step that lacks pages is made again, by graphs captured for the pages that a rank has now;
    a rank that has as many as before must not begin to capture by itself."""
    found = run_ranks(
        with_few_pages, layout.dp, layout, granularity, shard, layout=layout, seconds=200.0
    )
    for report, _ in found:
        assert report.good and report.one_process.good, report
        assert not report.silent_ranks() and report.ranks[0].made_again
    assert len({str(pages) for _, pages in found}) > 1
