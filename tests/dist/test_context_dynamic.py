"""Runs whose rows are spread over as many ranks as they need: plans, graphs, one process, data that
go on."""

import contextlib
import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from contextkit import Source, Tokens
from distkit import CPU, run_ranks
from rich.console import Console
from trainkit import equal, tiny

from packgraph.graphs.fallback import DOCUMENTS
from packgraph.graphs.graphed import graph
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, places
from packgraph.packing.document import IGNORED, Document
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.data import DataConfig, Microbatches, PlannedSteps
from packgraph.train.features import context as row_timing
from packgraph.train.features.context import (
    context_choices,
    context_request,
    places_multiple,
    with_context_buckets,
)
from packgraph.train.launch import prepare
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.progress import ProgressView
from packgraph.train.run_files import read_json
from packgraph.train.run_folder import SUMMARY
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer
from packgraph.train.validate import validate
from packgraph.verification.matrix import dynamic_config, switching_steps
from packgraph.verification.ranks import verify_ranks

TOKENS = 16  # of a rank
STEPS = 5  # two of warm-up
CP2, CP4 = Layout(dp=1, cp=2), Layout(dp=1, cp=4)
CP2_DP2, CP2_PP2, CP2_TP2 = Layout(dp=2, cp=2), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)


def config(layout, steps=STEPS, *, dropout=0.0, microsteps=3, model=None, min_cp=1, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(
        made.model,
        dropout=dropout,
        num_heads=4,
        num_kv_heads=2,
        tie_embeddings=False,
        **(model or {}),
    )
    capacities = tuple(Capacity(layout.cp * TOKENS, places) for places in (8, 64))
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, **{"capacities": capacities} | graph),
        data=DataConfig(window=16),
        parallel=ParallelConfig(
            dp=layout.dp,
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            expert_room=4.0,
            dynamic_cp=True,
            min_cp=min_cp,
        ),
        run=dataclasses.replace(
            made.run, tokens_per_step=microsteps * layout.dp * layout.cp * TOKENS, device="cpu"
        ),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def stream(settings, world):
    source = Source(settings.graph.capacities[0].tokens)
    return PlannedSteps(
        settings.data,
        source,
        Tokens(source),
        settings.graph.capacities,
        context_request(settings, world, CPU),
    )


def go(mesh, folder, settings, resume=False):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts."""
    view = ProgressView(settings.run.steps, 100, Console(quiet=True))
    with contextlib.closing(
        Trainer(settings, Path(folder), stream(settings, mesh.world), CPU, view, mesh)
    ) as run:
        if resume:
            run.resume()
        run.run(StopRequest())
        return dict(collect(mesh, run.tensors())), run.executor.totals()


def ranks(layout, folder, settings, *more):
    layout = dataclasses.replace(layout, contexts=settings.parallel.context_sizes)
    world = layout.dp * layout.pp * layout.cp * layout.tp
    return run_ranks(go, world, str(folder), settings, *more, layout=layout, seconds=120.0)


@pytest.mark.parametrize(
    ("layout", "granularities"),
    [
        (CP2, ("chunk",)),
        pytest.param(CP4, ("chunk",), marks=pytest.mark.slow),
        pytest.param(CP2_PP2, ("layer",), marks=pytest.mark.slow),
        pytest.param(CP2_DP2, ("layer", "chunk"), marks=pytest.mark.slow),
        pytest.param(CP2_TP2, ("chunk",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise(layout, granularities, tmp_path):
    eager, *_ = ranks(layout, tmp_path / "eager", config(layout, dropout=0.1, enabled=False))
    for granularity in granularities:
        settings = config(layout, dropout=0.1, granularity=granularity)
        graphs = ranks(layout, tmp_path / granularity, settings)
        equal(eager[0], graphs[0][0])
        for _, totals in graphs:
            assert totals["replayed"] >= (STEPS - 2) * 3 and set(totals["fallbacks"]) <= {"warm-up"}


def planned_sizes(settings, world, steps):
    """The numbers of ranks that rows of the first steps are spread over."""
    packs = stream(settings, world)
    return {row.capacity.tokens // TOKENS for _ in range(steps) for row in packs.next_step()}


def test_no_row_is_spread_over_fewer_ranks_than_asked_for(tmp_path):
    """Two sizes of groups instead of three, so fewer graphs; bitwise the eager run of the same
    plans."""
    assert planned_sizes(config(CP4), 4, STEPS) == {1, 2, 4}
    assert planned_sizes(config(CP4, min_cp=2), 4, STEPS) == {2, 4}
    buckets = [len(with_context_buckets(config(CP4, min_cp=n)).graph.capacities) for n in (1, 2, 4)]
    assert buckets == [6, 4, 2]
    eager, *_ = ranks(CP4, tmp_path / "eager", config(CP4, min_cp=2, enabled=False))
    found = ranks(CP4, tmp_path / "graphs", config(CP4, min_cp=2, granularity="chunk"))
    equal(eager[0], found[0][0])
    for _, totals in found:
        assert totals["replayed"] >= (STEPS - 2) * 3 and set(totals["fallbacks"]) <= {"warm-up"}


def verified(mesh, settings, layout):
    opened = (
        (lambda: switching_steps(layout))
        if layout is not None
        else lambda: stream(settings, mesh.world)
    )
    return verify_ranks("dynamic", settings, opened, CPU, mesh, one_process=settings.run.steps > 4)


@pytest.mark.parametrize(
    ("layout", "granularity", "steps"),
    [
        (CP4, "chunk", 6),
        pytest.param(CP2_PP2, "chunk", 5, marks=pytest.mark.slow),
        pytest.param(CP4, "layer", 5, marks=pytest.mark.slow),
        pytest.param(CP2_TP2, "chunk", 5, marks=pytest.mark.slow),
        pytest.param(CP2_TP2, "layer", 5, marks=pytest.mark.slow),
        pytest.param(CP2_PP2, "layer", 5, marks=pytest.mark.slow),
        pytest.param(CP2_DP2, "layer", 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_number_of_ranks_in_every_microbatch_is_verified(layout, granularity, steps):
    """Bitwise against eager on every rank, and one process within rounding; see SwitchingSteps for
    what it runs."""
    settings = dynamic_config(layout, granularity, steps)
    settings = dataclasses.replace(settings, graph=dataclasses.replace(settings.graph, strict=True))
    reports = run_ranks(
        verified, 4, settings, layout, layout=settings.parallel.layout(), seconds=120.0
    )
    assert all(report.good for report in reports), reports[0]
    assert not reports[0].silent_ranks()
    assert all(set(rank.fallbacks) <= {"warm-up"} for rank in reports[0].ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CP2, CP2_DP2], ids=str)
def test_planned_runs_learn_what_one_process_learns(layout):
    settings = config(layout, dropout=0.1)
    world = layout.dp * layout.cp
    reports = run_ranks(
        verified, world, settings, None, layout=settings.parallel.layout(), seconds=120.0
    )
    assert all(report.good for report in reports), reports[0]


def test_a_run_goes_on_bitwise_from_a_checkpoint_between_plans(tmp_path):
    whole = ranks(CP2, tmp_path / "whole", config(CP2, 6, enabled=False))[0][0]
    folder = tmp_path / "parts"
    ranks(CP2, folder, config(CP2, 3, enabled=False))
    equal(ranks(CP2, folder, config(CP2, 6, enabled=False), True)[0][0], whole)
    rows = [read_metrics(one / METRICS) for one in (folder, tmp_path / "whole")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


def test_rows_that_are_not_in_the_bank_run_eagerly_on_all_their_ranks_and_are_counted(tmp_path):
    """More documents than graphs were captured for: never a replay of another bucket, bitwise the
    eager run."""
    eager, *_ = ranks(
        CP2, tmp_path / "eager", config(CP2, dropout=0.1, max_documents=2, enabled=False)
    )
    graphs = ranks(
        CP2, tmp_path / "graphs", config(CP2, dropout=0.1, granularity="chunk", max_documents=2)
    )
    equal(eager[0], graphs[0][0])
    for _, totals in graphs:
        assert totals["fallbacks"].pop("warm-up") == 6 and totals["replayed"] > 0
        assert set(totals["fallbacks"]) == {DOCUMENTS} and totals["fallbacks"][DOCUMENTS] > 0


def timed_run(mesh, folder, settings, learn):
    """As `go`, and what plans went by in the end. learn: whether they go by what was timed, else by
    the estimates."""
    fitted = row_timing.fit if learn else lambda timings, prior, **_: prior
    with mock.patch.object(row_timing, "fit", fitted):
        found, totals = go(mesh, folder, settings)
    return found, totals, read_json(Path(folder) / SUMMARY)["context"]


def with_timed_rows(settings):
    return dataclasses.replace(
        settings, parallel=dataclasses.replace(settings.parallel, time_rows=True)
    )


def test_rows_that_are_timed_in_a_run_change_its_plans_and_nothing_else(tmp_path):
    """Bitwise the run that times nothing, where plans go by the same costs; with dropout, whose
    random numbers the timed rows have drawn, too."""
    settings = config(CP2, dropout=0.1, granularity="chunk")
    plain = ranks(CP2, tmp_path / "plain", settings)
    timed = run_ranks(
        timed_run,
        2,
        str(tmp_path / "timed"),
        with_timed_rows(settings),
        False,
        layout=settings.parallel.layout(),
        seconds=120.0,
    )
    equal(timed[0][0], plain[0][0])
    assert [found[1]["replayed"] for found in timed] == [found[1]["replayed"] for found in plain]
    assert timed[0][2]["cost_is_measured"] and timed[0][1]["fallbacks"] == plain[0][1]["fallbacks"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CP2, CP2_PP2], ids=str)
def test_all_ranks_plan_by_what_the_slowest_took(layout, tmp_path):
    """Plans that differ between ranks would make packs that differ, which stops a run."""
    settings = with_timed_rows(config(layout, 6, granularity="chunk"))
    world = layout.dp * layout.cp * layout.pp
    found = run_ranks(
        timed_run,
        world,
        str(tmp_path),
        settings,
        True,
        layout=settings.parallel.layout(),
        seconds=120.0,
    )
    assert found[0][2]["cost_is_measured"] and set(found[0][1]["fallbacks"]) <= {"warm-up"}
    assert found[0][2]["cost"] != vars(stream(settings, world).request.cost)


def test_numbers_of_ranks_that_no_row_can_have_are_refused_with_all_reasons():
    other = config(CP4, min_cp=3, granularity="step")
    found = validate(other, "cpu", world=4)
    assert any("min_cp = 3 must be one of" in text and "1, 2, 4" in text for text in found)
    assert any("graph.granularity = step" in text for text in found)
    fixed = dataclasses.replace(other, parallel=ParallelConfig(cp=4, min_cp=2))
    assert any("min_cp = 2 bounds groups" in text for text in validate(fixed, "cpu", world=4))
    assert not validate(config(CP4, min_cp=4), "cpu", world=4)


def isolated(mesh):
    """Losses of a row whose first document alone has labels, beside other documents, over 1, 2 and
    4 ranks; and of a row with a thousand tiny ones."""
    model = DecoderModel(config(CP4).model).train()
    spread_context(model, mesh, 64)
    found = []
    for size in (1, 2, 4):
        draw = np.random.default_rng(size)
        # neither ends where a rank's rows do
        first, rest = 17 * size + 1, 64 * size - 17 * size - 2
        tokens = draw.integers(32, size=first)
        for seed in range(3):
            other = np.random.default_rng(seed).integers(32, size=rest)
            row = PackedBatch.build(
                [
                    Document(other[: rest // 3], np.full(rest // 3, IGNORED)),
                    Document(tokens),
                    Document(other[rest // 3 :], np.full(rest - rest // 3, IGNORED)),
                ],
                Capacity(64 * size, 4),
            )
            model.zero_grad()
            loss = model(row, torch.ones((), dtype=torch.int64))
            loss.backward()
            found.append((size, loss.detach(), model.layers["0"].mlp.up_proj.weight.grad.clone()))
    tiny_ones = PackedBatch.build(
        [[number % 32, 1] for number in range(1000)], Capacity(2048, 1024)
    )
    return found, [model(tiny_ones, None, None, size).detach() for size in (1, 2, 4)]


def test_documents_do_not_see_each_other_whatever_shares_their_row():
    ranks_found = run_ranks(isolated, 4, layout=Layout(dp=1, cp=4, contexts=(1, 2, 4)))
    for found, _ in ranks_found:
        for size in (1, 2, 4):
            (_, loss, gradient), *others = [one for one in found if one[0] == size]
            for _, other, other_gradient in others:
                assert torch.equal(loss, other)
                torch.testing.assert_close(gradient, other_gradient, rtol=1e-4, atol=1e-6)
    whole = ranks_found[0][1][0]
    for place, size in ((1, 2), (2, 4)):
        torch.testing.assert_close(
            sum(tiny[place] for _, tiny in ranks_found[:size]), whole, rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [CP2, Layout(dp=2, cp=2, ep=2)], ids=str)
def test_experts_are_those_of_whole_rows_in_groups_of_any_size(layout):
    """Whatever its groups are, a rank has as many rows as every other, so exchanges of tokens are
    as without groups."""
    experts = {
        "experts": ExpertConfig(
            count=4,
            per_token=2,
            intermediate_size=16,
            shared=1,
            score="sigmoid",
            score_bias=True,
            bias_rate=0.01,
            load_loss=0.3,
            document_loss=0.2,
            z_loss=0.1,
        )
    }
    settings = config(layout, dropout=0.1, model=experts)
    reports = run_ranks(
        verified,
        layout.dp * layout.cp,
        settings,
        None,
        layout=settings.parallel.layout(),
        seconds=120.0,
    )
    assert all(report.good for report in reports), reports[0]


@pytest.mark.slow
def test_timing_graphs_against_eager_changes_no_numbers(tmp_path):
    eager = ranks(CP2, tmp_path / "eager", config(CP2, 24, enabled=False))[0][0]
    tuned, totals = ranks(CP2, tmp_path / "tuned", config(CP2, 24, autotune=True))[0]
    equal(eager, tuned)
    assert any("timed" in reason for reason in totals["fallbacks"])


# ---- streams of documents whose rows are cut in zigzag: packs have room


ALONE = Layout(dp=1)
CUT_TOKENS = 64  # of a row


def cut_config(layout, steps=5, *, heads=6, dynamic=False, kind="zigzag", **graph):
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
            **{
                "capacities": (Capacity(CUT_TOKENS, 8), Capacity(CUT_TOKENS, 64)),
                "granularity": "chunk",
            }
            | graph,
        ),
        parallel=ParallelConfig(dp=1, cp=layout.cp, cp_kind=kind, dynamic_cp=dynamic),
        run=dataclasses.replace(made.run, tokens_per_step=2 * CUT_TOKENS, device="cpu"),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def cut_stream(settings, world, multiple):
    source = Source(CUT_TOKENS)
    arguments = settings.data, source, Tokens(source), settings.graph.packing_capacities()
    if settings.parallel.dynamic_cp:
        return PlannedSteps(*arguments, context_request(settings, world, CPU), multiple)
    return Microbatches(*arguments, multiple)


def traced(*args, compile, **options):
    """torch's tracing compiler instead of the one that generates code."""
    return graph(*args, compile="aot_eager" if compile else False, **options)


def go_cut(mesh, folder, settings, multiple):
    view = ProgressView(settings.run.steps, 100, Console(quiet=True))
    with (
        mock.patch("packgraph.train.strategies.graph", traced),
        contextlib.closing(
            Trainer(
                settings, Path(folder), cut_stream(settings, mesh.world, multiple), CPU, view, mesh
            )
        ) as run,
    ):
        run.run(StopRequest())
        return {
            name: value.detach().clone() for name, value in run.model.named_parameters()
        }, run.executor.totals()


def test_two_ranks_learn_from_a_stream_what_one_learns(tmp_path):
    ranks = run_ranks(go_cut, 2, str(tmp_path / "two"), cut_config(CP2), 4, layout=CP2)
    alone = run_ranks(go_cut, 1, str(tmp_path / "one"), cut_config(ALONE), 4, layout=ALONE)
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
    one = cut_config(CP2, 4, compile=True, strict=True, capacities=(Capacity(CUT_TOKENS, 64),))
    eager, graphs = (
        run_ranks(
            go_cut,
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


def verified_cut(mesh, settings):
    multiple = places_multiple(settings)
    return verify_ranks(
        "zigzag",
        settings,
        lambda: cut_stream(settings, mesh.world, multiple),
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
    settings = cut_config(layout, heads=heads, dynamic=True, kind=kind, strict=True)
    kinds = {size: choice.kind for size, choice in context_choices(settings).items()}
    assert kinds == (
        {2: "zigzag"}
        if layout == CP2
        else {2: "zigzag" if kind == "zigzag" else "ulysses", 4: "zigzag"}
    )
    reports = run_ranks(
        verified_cut, layout.cp, settings, layout=settings.parallel.layout(), seconds=120.0
    )
    assert all(report.good for report in reports), reports[0]


def test_a_stream_leaves_room_for_documents_that_are_cut(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text(
        "\n".join(json.dumps({"text": "odd" * (number % 5 + 1)}) for number in range(80))
    )
    for dynamic in (False, True):
        settings = cut_config(CP4, kind="auto", dynamic=dynamic)
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
