"""Runs whose rows are spread over ranks: graphs equal eager bitwise, layouts equal one process,
checkpoints move."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import RandomPacks, close, equal, tiny, trainer

from packgraph.graphs.graphed import graph
from packgraph.models.config import ExpertConfig, LatentConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

pytestmark = pytest.mark.dist

ALONE, CP2, CP2_DP2 = Layout(dp=1), Layout(dp=1, cp=2), Layout(dp=2, cp=2)
CP4, CP2_PP2, CP2_TP2 = Layout(dp=1, cp=4), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)
CAPACITIES = (Capacity(32, 8), Capacity(64, 64))
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
    "latent": LatentConfig(kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8),
}


class Packs(RandomPacks):
    """Rows of one capacity after the other: one document over all ranks, single tokens, ranks with
    padding only, and what comes."""

    def __next__(self):
        draw = random.Random(self.position)
        capacity = CAPACITIES[self.position // 2 % 2]
        kinds = (
            [capacity.tokens],
            [1, *[2] * (capacity.documents // 2 - 1)],
            [5, 3],
            [draw.randint(2, capacity.tokens // 4) for _ in range(3)] + [capacity.tokens // 4],
        )
        lengths = kinds[self.position * 3 // 2 % 4]
        self.position += 1
        return pack(
            [[draw.randrange(32) for _ in range(length)] for length in lengths], [capacity]
        )[0]


def config(layout, steps=STEPS, *, dropout=0.0, tied=False, model=None, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(
        made.model,
        dropout=dropout,
        num_heads=4,
        num_kv_heads=2,
        tie_embeddings=tied,
        **(model or {}),
    )
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, **{"capacities": CAPACITIES} | graph),
        parallel=ParallelConfig(
            dp=layout.dp,
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            expert_room=4.0,
            cp_kind="ulysses",
        ),
        run=dataclasses.replace(made.run, tokens_per_step=90),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings, resume=False):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts."""
    run = trainer(Path(folder), settings, Packs(), mesh=mesh)
    try:
        if resume:
            run.resume()
        run.run(StopRequest())
        return dict(collect(mesh, run.tensors())), run.executor.totals()
    finally:
        run.close()


def ranks(layout, *arguments):
    world = layout.dp * layout.pp * layout.cp * layout.tp
    return run_ranks(go, world, *arguments, layout=layout, seconds=120.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and tensors of one process."""
    folder = tmp_path_factory.mktemp("one") / "alone"
    return folder, ranks(ALONE, str(folder), config(ALONE, enabled=False))[0][0]


@pytest.mark.parametrize(
    ("layout", "granularities", "tied"),
    [
        (CP2, ("chunk",), False),
        (CP2_DP2, ("chunk",), False),
        (CP2_PP2, ("layer",), True),
        pytest.param(CP2, ("layer", "step"), True, marks=pytest.mark.slow),
        pytest.param(CP2_DP2, ("layer", "step"), True, marks=pytest.mark.slow),
        pytest.param(CP2_PP2, ("chunk", "step"), False, marks=pytest.mark.slow),
        pytest.param(CP2_TP2, ("chunk",), False, marks=pytest.mark.slow),
        pytest.param(CP4, ("chunk", "step"), False, marks=pytest.mark.slow),
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
        assert all(totals["replayed"] > 0 for _, totals in graphs)


@pytest.mark.slow
def test_a_step_with_its_update_in_one_graph_equals_the_eager_one_bitwise(tmp_path):
    """Replicas see other packs, ranks that share rows see the same: so collectives of the update
    can be captured."""
    eager, graphs = (
        ranks(
            CP2,
            str(tmp_path / str(enabled)),
            config(CP2, enabled=enabled, granularity="step", optimizer=True, strict=True),
        )
        for enabled in (False, True)
    )
    equal(eager[0][0], graphs[0][0])
    assert all(totals["replayed"] == STEPS - 2 for _, totals in graphs)


@pytest.mark.parametrize(
    "layout",
    [
        CP2_DP2,
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in (CP2, CP4, CP2_PP2, CP2_TP2)),
    ],
    ids=str,
)
def test_ranks_that_share_rows_learn_what_one_process_learns(layout, alone, tmp_path):
    folder, expected = alone
    close(ranks(layout, str(tmp_path / "shared"), config(layout))[0][0], expected)
    equal_metrics(tmp_path / "shared", folder)


def equal_metrics(folder, other):
    """The same losses, gradient norms and counts in every step of two runs, up to rounding."""
    for ours, theirs in zip(
        read_metrics(folder / METRICS), read_metrics(other / METRICS), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert (ours["tokens"], ours["places"]) == (theirs["tokens"], theirs["places"])


@pytest.mark.parametrize(
    "layout",
    [
        CP2,
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (CP2_PP2, Layout(dp=2, cp=2, ep=2))
        ),
    ],
    ids=str,
)
def test_latent_attention_and_experts_are_those_of_whole_rows(layout, tmp_path):
    """Balance losses of the row and of each document, which lie on several ranks; and graphs equal
    eager bitwise."""
    alone = ranks(ALONE, str(tmp_path / "alone"), config(ALONE, 4, model=EXPERTS, enabled=False))[
        0
    ][0]
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, 4, model=EXPERTS, enabled=False))[
        0
    ][0]
    graphs = ranks(
        layout, str(tmp_path / "graphs"), config(layout, 4, model=EXPERTS, granularity="chunk")
    )
    close(eager, alone)
    equal_metrics(tmp_path / "eager", tmp_path / "alone")
    equal(eager, graphs[0][0])
    assert all(totals["replayed"] > 0 for _, totals in graphs)


def test_a_checkpoint_moves_between_numbers_of_ranks_that_share_rows(alone, tmp_path):
    folder = str(tmp_path / "moved")
    ranks(CP2, folder, config(CP2, 3))
    close(ranks(ALONE, folder, config(ALONE), True)[0][0], alone[1])


def switching(mesh, graphs):
    """Loss and gradients of microbatches whose rows are spread over another number of ranks each
    time."""
    model = DecoderModel(
        dataclasses.replace(config(ALONE).model, dropout=0.1, num_layers=2)
    ).train()
    spread_context(model, mesh)
    call = (
        graph(model, capacities=CAPACITIES, granularity="chunk", strict=True, warmup=2)
        if graphs
        else model
    )
    batches, trace = list(itertools.islice(Packs(), 16)), []
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
    """Forced switching: the number is a constant of the call and so of the key; bitwise the eager
    calls."""
    eager, graphs = (run_ranks(switching, 2, use, layout=CP2) for use in (False, True))
    for (expected, _), (found, (captured, replayed, fallbacks)) in zip(eager, graphs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert captured == 4, "two capacities, each over one and over two ranks"
        assert replayed == 14 and sum(fallbacks.values()) == 2


def rows_that_cannot_be_spread(mesh):
    model = DecoderModel(config(ALONE).model)
    spread_context(model, mesh)
    with pytest.raises(ValueError, match=r"cannot be spread over 3 ranks: .* groups of \[1, 2\]"):
        model(PackedBatch.build([[1, 2]], Capacity(6, 1)), None, None, 3)
    with pytest.raises(ValueError, match="a row of 7 tokens cannot be spread evenly over 2 ranks"):
        model(PackedBatch.build([[1, 2]], Capacity(7, 1)))
    return float(model(PackedBatch.build([[1, 2]], Capacity(7, 1)), None, None, 1)), model.context


def test_a_call_says_over_how_many_ranks_its_row_is_spread():
    (first, size), other = run_ranks(rows_that_cannot_be_spread, 2, layout=CP2)
    assert (first, size) == other and first > 0 and size == 2


def test_what_cannot_be_is_refused_with_reasons():
    def problems(layout, world, **options):
        return validate(config(layout, **options), "cpu", world=world)

    assert any(
        "num_heads (4) must be a multiple of 3" in problem
        for problem in problems(Layout(dp=1, cp=3), 3)
    )
    assert any(
        "num_heads (4 / tp 2) must be" in problem
        for problem in problems(Layout(dp=1, cp=4, tp=2), 8)
    )
    assert any(
        "multiple of that, not 34" in problem
        for problem in problems(
            Layout(dp=1, cp=2, tp=2), 4, capacities=(Capacity(34, 4), Capacity(64, 4))
        )
    )
    assert not problems(CP2_TP2, 4)
    with pytest.raises(ValueError, match="cp must be at least 1, got 0"):
        ParallelConfig(cp=0)
