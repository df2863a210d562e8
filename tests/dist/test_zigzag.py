"""Runs whose rows are cut in zigzag: graphs equal eager bitwise, layouts equal one process, and
heads do not matter."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import RandomPacks, close, equal, tiny, trainer

from packgraph.graphs.graphed import forward_backward, graph
from packgraph.models.config import ExpertConfig, LatentConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.presets import hybrid_tiny
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.features.context import context_notes, places_multiple
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

pytestmark = pytest.mark.dist

ALONE, CP2, CP4 = Layout(dp=1), Layout(dp=1, cp=2), Layout(dp=1, cp=4)
CP2_DP2, CP2_PP2, CP2_TP2 = Layout(dp=2, cp=2), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)
CAPACITIES = (Capacity(32, 4), Capacity(64, 8))
PLACES = 8  # what documents take up multiples of: with four ranks, and so with two
STEPS = 5  # two of warm-up
EXPERTS = {
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
    "latent": LatentConfig(kv_rank=8, nope_dim=8, rope_dim=8, value_dim=4),
}


class Packs(RandomPacks):
    """Rows of one capacity after the other: one document over all ranks, tiny ones, one token, what
    comes."""

    def __next__(self):
        draw = random.Random(self.position)
        capacity = CAPACITIES[self.position // 2 % 2]
        kinds = (
            [capacity.tokens - 3],
            [2] * (capacity.tokens // PLACES - 1),
            [1, 5],
            [draw.randint(2, capacity.tokens // 4) for _ in range(2)] + [capacity.tokens // 4 + 3],
        )
        lengths = kinds[self.position * 3 // 2 % 4]
        self.position += 1
        (made,) = pack(
            [[draw.randrange(32) for _ in range(length)] for length in lengths],
            [capacity],
            multiple=PLACES,
        )
        return made


def config(layout, steps=STEPS, *, dropout=0.0, tied=False, kind="zigzag", model=None, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(
        made.model,
        dropout=dropout,
        num_heads=6,
        num_kv_heads=2,
        tie_embeddings=tied,
        **(model or {}),
    )
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, **{"capacities": CAPACITIES} | graph),
        parallel=ParallelConfig(
            dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp, expert_room=4.0, cp_kind=kind
        ),
        run=dataclasses.replace(made.run, tokens_per_step=60),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts; the kinds of its
    contexts."""
    run = trainer(Path(folder), settings, Packs(), mesh=mesh)
    try:
        run.run(StopRequest())
        kinds = {size: context.kind for size, context in run.model.chunks[0].contexts.items()}
        return dict(collect(mesh, run.tensors())), run.executor.totals(), kinds
    finally:
        run.close()


def ranks(layout, *arguments):
    world = layout.dp * layout.pp * layout.cp * layout.tp
    return run_ranks(go, world, *arguments, layout=layout, seconds=120.0)


def equal_metrics(folder, other):
    """The same losses, gradient norms and counts in every step of two runs, up to rounding."""
    for ours, theirs in zip(
        read_metrics(folder / METRICS), read_metrics(other / METRICS), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert (ours["tokens"], ours["places"]) == (theirs["tokens"], theirs["places"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and tensors of one process."""
    folder = tmp_path_factory.mktemp("one") / "alone"
    return folder, ranks(ALONE, str(folder), config(ALONE, enabled=False))[0][0]


@pytest.mark.parametrize(
    "layout",
    [CP2, *(pytest.param(layout, marks=pytest.mark.slow) for layout in (CP4, CP2_TP2))],
    ids=str,
)
def test_ranks_that_cut_documents_learn_what_one_process_learns(layout, alone, tmp_path):
    folder, expected = alone
    found, totals, kinds = ranks(layout, str(tmp_path / "cut"), config(layout))[0]
    close(found, expected)
    equal_metrics(tmp_path / "cut", folder)
    assert totals["replayed"] > 3 and kinds == {layout.cp: "zigzag"}


@pytest.mark.parametrize(
    ("layout", "granularities", "tied"),
    [
        (CP2, ("chunk",), False),
        pytest.param(CP2_DP2, ("layer",), True, marks=pytest.mark.slow),
        pytest.param(CP2_PP2, ("chunk", "step"), True, marks=pytest.mark.slow),
        pytest.param(CP4, ("step",), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise(layout, granularities, tied, tmp_path):
    eager, *_ = ranks(
        layout, str(tmp_path / "eager"), config(layout, dropout=0.1, tied=tied, enabled=False)
    )
    for granularity in granularities:
        settings = config(layout, dropout=0.1, tied=tied, granularity=granularity)
        graphs = ranks(layout, str(tmp_path / granularity), settings)
        equal(eager[0], graphs[0][0])
        assert all(
            totals["replayed"] >= (STEPS - 2 if granularity == "step" else 4)
            for _, totals, _ in graphs
        )


def test_latent_attention_and_experts_are_those_of_whole_rows(tmp_path):
    """Balance losses of the row and of each document, which lie on all ranks; and graphs equal
    eager bitwise."""
    alone = ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 4, model=EXPERTS, enabled=False))[
        0
    ][0]
    eager = ranks(CP2, str(tmp_path / "eager"), config(CP2, 4, model=EXPERTS, enabled=False))[0][0]
    graphs = ranks(
        CP2, str(tmp_path / "graphs"), config(CP2, 4, model=EXPERTS, granularity="chunk")
    )
    close(eager, alone)
    equal_metrics(tmp_path / "eager", tmp_path / "alone")
    equal(eager, graphs[0][0])
    assert all(totals["replayed"] > 0 for _, totals, _ in graphs)


def switching(mesh, graphs):
    """Loss and gradients of microbatches whose rows are cut for another number of ranks each time;
    some are empty."""
    model = DecoderModel(
        dataclasses.replace(config(ALONE).model, dropout=0.1, num_layers=2)
    ).train()
    spread_context(model, mesh, wish="zigzag")
    call = (
        graph(model, capacities=CAPACITIES, granularity="chunk", strict=True, warmup=2)
        if graphs
        else model
    )
    batches, trace = list(itertools.islice(Packs(), 14)), []
    batches[8:8] = [PackedBatch.empty(capacity) for capacity in CAPACITIES]
    torch.manual_seed(mesh.rank)
    for number, batch in enumerate(batches):
        loss = call(batch, None, None, (1, 2, 2, 1)[number % 4])
        loss.backward()
        trace += [
            loss.detach().clone(),
            *(parameter.grad.clone() for parameter in model.parameters()),
        ]
    counts = (
        (call.stats.captured, call.stats.replayed, dict(call.stats.fallbacks)) if graphs else None
    )
    if graphs:
        call.close()
    return trace, counts


def test_a_bank_holds_graphs_for_several_numbers_of_ranks():
    eager, graphs = (run_ranks(switching, 2, use, layout=CP2) for use in (False, True))
    for (expected, _), (found, (captured, replayed, fallbacks)) in zip(eager, graphs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert captured == 4, "two capacities, each over one and over two ranks"
        assert replayed == 14 and sum(fallbacks.values()) == 2


def rows_that_cannot_be_cut(mesh):
    model = DecoderModel(config(ALONE).model)
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
        forward_backward(call, crowded)
    assert not forward_backward(call, PackedBatch.build([[1, 2]] * 2, Capacity(8, 3))).isnan(), (
        "its slot is free again"
    )
    call.close()


def test_documents_that_do_not_fit_when_padded_are_refused():
    run_ranks(rows_that_cannot_be_cut, 2, layout=CP2)


def test_a_run_takes_zigzag_where_heads_cannot_be_shared():
    def problems(layout, world, **options):
        return validate(config(layout, **options), "cpu", world=world)

    assert not problems(CP4, 4, kind="auto") and not problems(CP2, 2)
    assert any(
        "num_heads (6) must be a multiple of 4" in problem
        for problem in problems(CP4, 4, kind="ulysses")
    )
    (problem,) = problems(CP4, 4, kind="auto", capacities=(Capacity(64, 4, 30),))
    assert "longest document are multiples of 8, not" in problem and "ulysses" not in problem, (
        "which is no way out"
    )
    (problem,) = problems(CP2, 2, capacities=(Capacity(34, 4),))
    assert "multiples of 4, not" in problem and problem.endswith(
        "; or choose parallel.cp_kind = ulysses"
    )
    assert not problems(CP2, 2, kind="auto", capacities=(Capacity(34, 4),)), (
        "two ranks share six heads"
    )
    assert [
        places_multiple(config(layout, kind=kind))
        for layout, kind in (
            (CP4, "auto"),
            (CP2, "auto"),
            (CP2, "zigzag"),
            (ALONE, "zigzag"),
            (CP4, "ulysses"),
        )
    ] == [8, 1, 4, 1, 1]
    assert context_notes(config(CP4, kind="auto")) == [
        "rows are cut in zigzag (4 ranks: 4 ranks do not divide 6 heads), documents take up "
        "multiples of 8 places"
    ]
    assert not context_notes(config(CP2, kind="auto"))


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
