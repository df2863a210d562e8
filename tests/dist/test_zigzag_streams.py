"""Runs over streams of documents whose rows are cut in zigzag: packs have room, also where ranks of
a row change."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from contextkit import Source, Tokens
from distkit import CPU, run_ranks
from rich.console import Console
from trainkit import tiny

from packgraph.graphs.graphed import graph
from packgraph.packing.capacity import Capacity, places
from packgraph.parallel.mesh import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.data import DataConfig, PlannedSteps, open_microbatches
from packgraph.train.features.context import context_choices, context_request, places_multiple
from packgraph.train.launch import prepare
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.progress import ProgressView
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer
from packgraph.verification.ranks import verify_ranks

pytestmark = pytest.mark.dist

ALONE, CP2, CP4 = Layout(dp=1), Layout(dp=1, cp=2), Layout(dp=1, cp=4)
TOKENS = 64  # of a row


def config(layout, steps=5, *, heads=6, dynamic=False, kind="zigzag", **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(
        made.model, dropout=0.0, num_heads=heads, num_kv_heads=heads // 3, tie_embeddings=False
    )
    return dataclasses.replace(
        made,
        model=model,
        data=DataConfig(window=16),
        graph=dataclasses.replace(
            made.graph,
            **{"capacities": (Capacity(TOKENS, 8), Capacity(TOKENS, 64)), "granularity": "chunk"}
            | graph,
        ),
        parallel=ParallelConfig(dp=1, cp=layout.cp, cp_kind=kind, dynamic_cp=dynamic),
        run=dataclasses.replace(made.run, tokens_per_step=2 * TOKENS, device="cpu"),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def stream(settings, world, multiple):
    source = Source(TOKENS)
    arguments = settings.data, source, Tokens(source), settings.graph.packing_capacities()
    if settings.parallel.dynamic_cp:
        return PlannedSteps(*arguments, context_request(settings, world, CPU), multiple)
    return open_microbatches(*arguments, multiple)


def traced(*args, compile, **options):
    """torch's tracing compiler instead of the one that generates code."""
    return graph(*args, compile="aot_eager" if compile else False, **options)


def go(mesh, folder, settings, multiple):
    view = ProgressView(settings.run.steps, 100, Console(quiet=True))
    with mock.patch("packgraph.train.strategies.graph", traced):
        run = Trainer(
            settings, Path(folder), stream(settings, mesh.world, multiple), CPU, view, mesh
        )
        try:
            run.run(StopRequest())
            return {
                name: value.detach().clone() for name, value in run.model.named_parameters()
            }, run.executor.totals()
        finally:
            run.close()


def test_two_ranks_learn_from_a_stream_what_one_learns(tmp_path):
    ranks = run_ranks(go, 2, str(tmp_path / "two"), config(CP2), 4, layout=CP2)
    alone = run_ranks(go, 1, str(tmp_path / "one"), config(ALONE), 4, layout=ALONE)
    rows = [read_metrics(tmp_path / name / METRICS) for name in ("two", "one")]
    for ours, theirs in zip(*rows, strict=True):
        assert (ours["tokens"], ours["places"]) == (theirs["tokens"], theirs["places"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    for name, value in alone[0][0].items():
        torch.testing.assert_close(ranks[0][0][name], value, rtol=1e-3, atol=1e-4)
        assert torch.equal(ranks[0][0][name], ranks[1][0][name])
    assert all(
        totals["replayed"] >= 4 and set(totals["fallbacks"]) <= {"warm-up"} for _, totals in ranks
    )


@pytest.mark.slow
def test_graphs_of_compiled_stages_equal_the_stages(tmp_path):
    one = config(CP2, 4, compile=True, strict=True, capacities=(Capacity(TOKENS, 64),))
    eager, graphs = (
        run_ranks(
            go,
            2,
            str(tmp_path / str(warmup)),
            dataclasses.replace(one, graph=dataclasses.replace(one.graph, warmup=warmup)),
            4,
            layout=CP2,
            seconds=240.0,
        )
        for warmup in (10**6, 2)
    )
    for (expected, _), (found, totals) in zip(eager, graphs, strict=True):
        assert totals["replayed"] > 0
        assert not [name for name in found if not torch.equal(expected[name], found[name])]


def verified(mesh, settings):
    multiple = places_multiple(settings)
    return verify_ranks(
        "zigzag",
        settings,
        lambda: stream(settings, mesh.world, multiple),
        CPU,
        mesh,
        one_process=True,
    )


@pytest.mark.parametrize(
    ("layout", "heads", "kind"),
    [
        pytest.param(CP2, 3, "auto", marks=pytest.mark.slow),
        pytest.param(CP4, 6, "auto", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_changing_numbers_of_ranks_are_verified(layout, heads, kind):
    """Six heads are shared by two ranks and not by four. Bitwise against eager, and one process
    within rounding."""
    settings = config(layout, heads=heads, dynamic=True, kind=kind, strict=True)
    kinds = {size: choice.kind for size, choice in context_choices(settings).items()}
    assert kinds == (
        {2: "zigzag"}
        if layout == CP2
        else {2: "zigzag" if kind == "zigzag" else "ulysses", 4: "zigzag"}
    )
    reports = run_ranks(
        verified, layout.cp, settings, layout=settings.parallel.layout(), seconds=120.0
    )
    assert all(report.good for report in reports), reports[0]


def test_a_stream_leaves_room_for_documents_that_are_cut(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text(
        "\n".join(json.dumps({"text": "odd" * (number % 5 + 1)}) for number in range(80))
    )
    for dynamic in (False, True):
        settings = config(CP4, kind="auto", dynamic=dynamic)
        settings = dataclasses.replace(
            settings,
            data=DataConfig(source="jsonl", path=str(data), window=16, overlong="split"),
            model=dataclasses.replace(settings.model, vocab_size=512),
        )
        prepared = prepare(settings, CPU, 4)
        assert "documents take up multiples of 8 places" in prepared.notes[-1]
        packs = (
            prepared.microbatches.next_step()
            if dynamic
            else [next(prepared.microbatches) for _ in range(3)]
        )
        assert max(len(batch.lengths) for batch in packs) > 1, "one alone always fits"
        assert packs and all(
            sum(places(length, 8) for length in batch.lengths) <= batch.capacity.tokens
            for batch in packs
        )
