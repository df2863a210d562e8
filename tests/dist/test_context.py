"""Runs whose rows are spread over ranks, by heads (ulysses) or cut in zigzag: graphs equal eager
bitwise, layouts equal one process, checkpoints move."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from contextkit import SPREAD, SpreadPacks, equal_metrics, switched
from distkit import run_ranks
from trainkit import close, equal, finished, tiny

from packgraph.graphs import agreement
from packgraph.graphs.graphed import graph
from packgraph.models.config import ExpertConfig, LatentConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.presets import hybrid_tiny
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.features.context import context_choices, context_notes, places_multiple
from packgraph.train.validate import validate

ALONE, CP2, CP4 = Layout(dp=1), Layout(dp=1, cp=2), Layout(dp=1, cp=4)
CP2_DP2, CP2_PP2, CP2_TP2 = Layout(dp=2, cp=2), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)
HEADS = {"ulysses": 4, "zigzag": 6}  # four ranks cannot share six
TOKENS_PER_STEP = {"ulysses": 90, "zigzag": 60}
STEPS = 5  # two of warm-up


def experts(kind):
    return {
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
        ),
        "latent": LatentConfig(
            kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8 if kind == "ulysses" else 4
        ),
    }


def config(kind, layout, steps=STEPS, *, asked=None, dropout=0.0, tied=False, model=None, **graph):
    """Settings of a run. asked: the kind that it asks for, where that is another one."""
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(
        made.model,
        dropout=dropout,
        num_heads=HEADS[kind],
        num_kv_heads=2,
        tie_embeddings=tied,
        **(model or {}),
    )
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, **{"capacities": SPREAD[kind]} | graph),
        parallel=ParallelConfig(
            dp=layout.dp,
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            expert_room=4.0,
            cp_kind=asked or kind,
        ),
        run=dataclasses.replace(made.run, tokens_per_step=TOKENS_PER_STEP[kind]),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, kind, folder, settings, resume=False):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts; the kinds of its
    contexts."""
    with finished(Path(folder), settings, SpreadPacks(kind), mesh=mesh, resume=resume) as run:
        kinds = {size: context.kind for size, context in run.model.chunks[0].contexts.items()}
        return dict(collect(mesh, run.tensors())), run.executor.totals(), kinds


def ranks(kind, layout, folder, settings, *more):
    world = layout.dp * layout.pp * layout.cp * layout.tp
    return run_ranks(go, world, kind, str(folder), settings, *more, layout=layout, seconds=120.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and tensors of one process, by the kind of rows."""
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "alone"
            made[kind] = (
                folder,
                ranks(kind, ALONE, folder, config(kind, ALONE, enabled=False))[0][0],
            )
        return made[kind]

    return of


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("kind", "layout", "granularities", "tied"),
    [
        ("ulysses", CP2, ("chunk",), False),
        ("ulysses", CP2_DP2, ("chunk",), False),
        ("ulysses", CP2_PP2, ("layer",), True),
        ("zigzag", CP2, ("chunk",), False),
        *slow(
            ("ulysses", CP2, ("layer", "step"), True),
            ("ulysses", CP2_DP2, ("layer", "step"), True),
            ("ulysses", CP2_PP2, ("chunk", "step"), False),
            ("ulysses", CP2_TP2, ("chunk",), False),
            ("ulysses", CP4, ("chunk", "step"), False),
            ("zigzag", CP2_DP2, ("layer",), True),
            ("zigzag", CP2_PP2, ("chunk", "step"), True),
            ("zigzag", CP4, ("step",), False),
        ),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise(kind, layout, granularities, tied, tmp_path):
    options = {"dropout": 0.1, "tied": tied}
    eager, *_ = ranks(
        kind, layout, tmp_path / "eager", config(kind, layout, enabled=False, **options)
    )
    for granularity in granularities:
        settings = config(kind, layout, granularity=granularity, **options)
        graphs = ranks(kind, layout, tmp_path / granularity, settings)
        equal(eager[0], graphs[0][0])
        least = STEPS - 2 if granularity == "step" else 4
        assert all(totals["replayed"] >= least for _, totals, _ in graphs)


@pytest.mark.slow
def test_a_step_with_its_update_in_one_graph_equals_the_eager_one_bitwise(tmp_path):
    """Replicas see other packs, ranks that share rows see the same: so collectives of the update
    can be captured."""
    options = {"granularity": "step", "optimizer": True, "strict": True}
    eager, graphs = (
        ranks(
            "ulysses",
            CP2,
            tmp_path / str(enabled),
            config("ulysses", CP2, enabled=enabled, **options),
        )
        for enabled in (False, True)
    )
    equal(eager[0][0], graphs[0][0])
    assert all(totals["replayed"] == STEPS - 2 for _, totals, _ in graphs)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ulysses", CP2_DP2),
        ("zigzag", CP2),
        *slow(*(("ulysses", layout) for layout in (CP2, CP4, CP2_PP2, CP2_TP2))),
        *slow(*(("zigzag", layout) for layout in (CP4, CP2_TP2))),
    ],
    ids=str,
)
def test_ranks_that_share_rows_learn_what_one_process_learns(kind, layout, alone, tmp_path):
    folder, expected = alone(kind)
    found, totals, kinds = ranks(kind, layout, tmp_path / "shared", config(kind, layout))[0]
    close(found, expected)
    equal_metrics(tmp_path / "shared", folder)
    assert totals["replayed"] > 3 and kinds == {layout.cp: kind}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ulysses", CP2),
        ("zigzag", CP2),
        *slow(("ulysses", CP2_PP2), ("ulysses", Layout(dp=2, cp=2, ep=2))),
    ],
    ids=str,
)
def test_latent_attention_and_experts_are_those_of_whole_rows(kind, layout, tmp_path):
    """Balance losses of the row and of each document, which lie on several ranks; and graphs equal
    eager bitwise."""

    def run(name, place, **options):
        settings = config(kind, place, 4, model=experts(kind), **options)
        return ranks(kind, place, tmp_path / name, settings)

    whole = run("alone", ALONE, enabled=False)[0][0]
    eager = run("eager", layout, enabled=False)[0][0]
    graphs = run("graphs", layout, granularity="chunk")
    close(eager, whole)
    equal_metrics(tmp_path / "eager", tmp_path / "alone")
    equal(eager, graphs[0][0])
    assert all(totals["replayed"] > 0 for _, totals, _ in graphs)


def test_a_checkpoint_moves_between_numbers_of_ranks_that_share_rows(alone, tmp_path):
    folder, kind = tmp_path / "moved", "ulysses"
    ranks(kind, CP2, folder, config(kind, CP2, 3))
    close(ranks(kind, ALONE, folder, config(kind, ALONE), True)[0][0], alone(kind)[1])


def switching(mesh, kind, graphs):
    """Two of the microbatches are empty where rows are cut."""
    shape = dataclasses.replace(config(kind, ALONE).model, dropout=0.1, num_layers=2)
    model, batches = DecoderModel(shape).train(), list(itertools.islice(SpreadPacks(kind), 16))
    spread_context(model, mesh, wish=kind)
    assert agreement.consensus_of(model) is not agreement.alone
    if kind == "zigzag":
        batches[8:10] = [PackedBatch.empty(capacity) for capacity in SPREAD[kind]]
    return switched(mesh, model, SPREAD[kind], batches, graphs)


@pytest.mark.parametrize("kind", HEADS)
def test_a_bank_holds_graphs_for_several_numbers_of_ranks(kind):
    """Forced switching: the number is a constant of the call and so of the key; bitwise the eager
    calls."""
    eager, graphs = (run_ranks(switching, 2, kind, use, layout=CP2) for use in (False, True))
    for (expected, _), (found, (captured, replayed, fallbacks)) in zip(eager, graphs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert captured == 4, "two capacities, each over one and over two ranks"
        assert replayed == 14 and sum(fallbacks.values()) == 2


def rows_that_cannot_be_spread(mesh):
    model = DecoderModel(config("ulysses", ALONE).model)
    spread_context(model, mesh)
    with pytest.raises(ValueError, match=r"cannot be spread over 3 ranks: .* groups of \[1, 2\]"):
        model(PackedBatch.build([[1, 2]], Capacity(6, 1)), None, None, 3)
    with pytest.raises(ValueError, match="a row of 7 tokens cannot be spread evenly over 2 ranks"):
        model(PackedBatch.build([[1, 2]], Capacity(7, 1)))
    return float(model(PackedBatch.build([[1, 2]], Capacity(7, 1)), None, None, 1)), model.context


def test_a_call_says_over_how_many_ranks_its_row_is_spread():
    (first, size), other = run_ranks(rows_that_cannot_be_spread, 2, layout=CP2)
    assert (first, size) == other and first > 0 and size == 2


def rows_that_cannot_be_cut(mesh):
    model = DecoderModel(config("zigzag", ALONE).model)
    spread_context(model, mesh, wish="zigzag")
    crowded = PackedBatch.build([[1, 2]] * 3, Capacity(8, 3))
    with pytest.raises(
        ValueError, match=r"the row has 8: from document 2 \(2 tokens\) on they do not fit; pack"
    ):
        model(crowded)
    assert model(crowded.without_lengths()).isnan(), "where the host does not know, the device does"
    with pytest.raises(
        ValueError, match="6 tokens cannot be cut into the 4 parts that zigzag needs with 2 ranks"
    ):
        model(PackedBatch.build([[1, 2]], Capacity(6, 1)))
    call = graph(model.train(), capacities=crowded.capacity, strict=True, warmup=1)
    for _ in range(3):
        call(PackedBatch.build([[1, 2]] * 2, Capacity(8, 3))).backward()
    assert call.stats.replayed == 2
    with pytest.raises(ValueError, match="take up 12 places"):
        call(crowded)
    # without autograd nobody makes a first state
    with pytest.raises(ValueError, match="from document 2"):
        call.forward_backward(crowded)
    assert not call.forward_backward(PackedBatch.build([[1, 2]] * 2, Capacity(8, 3))).isnan(), (
        "its slot is free again"
    )
    call.close()


def test_documents_that_do_not_fit_when_padded_are_refused():
    run_ranks(rows_that_cannot_be_cut, 2, layout=CP2)


def problems(kind, layout, world, **options):
    return validate(config(kind, layout, **options), "cpu", world=world)


@pytest.mark.parametrize(
    ("kind", "layout", "world", "options", "reason"),
    [
        ("ulysses", Layout(dp=1, cp=3), 3, {}, "num_heads (4) must be a multiple of 3"),
        ("ulysses", Layout(dp=1, cp=4, tp=2), 8, {}, "num_heads (4 / tp 2) must be"),
        (
            "ulysses",
            CP2_TP2,
            4,
            {"capacities": (Capacity(34, 4), Capacity(64, 4))},
            "multiple of that, not 34",
        ),
        ("zigzag", CP4, 4, {"asked": "ulysses"}, "num_heads (6) must be a multiple of 4"),
    ],
)
def test_what_cannot_be_is_refused_with_reasons(kind, layout, world, options, reason):
    assert any(reason in problem for problem in problems(kind, layout, world, **options))


def test_a_run_takes_zigzag_where_heads_cannot_be_shared():
    assert not problems("zigzag", CP4, 4, asked="auto") and not problems("zigzag", CP2, 2)
    (problem,) = problems("zigzag", CP4, 4, asked="auto", capacities=(Capacity(64, 4, 30),))
    assert "longest document are multiples of 8, not" in problem and "ulysses" not in problem, (
        "which is no way out"
    )
    (problem,) = problems("zigzag", CP2, 2, capacities=(Capacity(34, 4),))
    assert "multiples of 4, not" in problem and problem.endswith(
        "; or choose parallel.cp_kind = ulysses"
    )
    assert not problems("zigzag", CP2, 2, asked="auto", capacities=(Capacity(34, 4),)), (
        "two ranks share six heads"
    )
    assert [
        places_multiple(config("zigzag", layout, asked=asked))
        for layout, asked in (
            (CP4, "auto"),
            (CP2, "auto"),
            (CP2, "zigzag"),
            (ALONE, "zigzag"),
            (CP4, "ulysses"),
        )
    ] == [8, 1, 4, 1, 1]
    assert context_notes(context_choices(config("zigzag", CP4, asked="auto"))) == [
        "rows are cut in zigzag (4 ranks: 4 ranks do not divide 6 heads), documents take up "
        "multiples of 8 places"
    ]
    assert not context_notes(context_choices(config("zigzag", CP2, asked="auto")))


def test_layers_that_scan_rows_in_order_are_not_cut():
    hybrid = dataclasses.replace(
        hybrid_tiny(), parallel=ParallelConfig(dp=1, cp=2, cp_kind="zigzag")
    )
    assert any(
        "cannot be cut in zigzag for Mamba-2" in problem
        for problem in validate(hybrid, "cpu", world=2)
    )
    hybrid = dataclasses.replace(hybrid, parallel=ParallelConfig(dp=1, cp=2))
    assert not validate(hybrid, "cpu", world=2) and places_multiple(hybrid) == 1
