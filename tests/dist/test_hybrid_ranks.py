"""Hybrids over several ranks: Mamba-2 on rows spread over ranks is that of one process, graphs
equal eager bitwise."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from contextkit import SPREAD, SpreadPacks, equal_metrics, switched
from distkit import run_ranks
from mambakit import EXPERTS, MAMBA, hybrid, naive_mixer, random_hybrid
from trainkit import close, equal, finished, tiny

from packgraph.mamba.shape import ScanShape, ranks_problem
from packgraph.models.decoder import DecoderModel
from packgraph.ops.attention.context import ContextGroup, own_rows
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.rows import context_problems, spread_context
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.validate import validate
from packgraph.verification.matrix import dynamic_config, switching_steps, tiny_hybrid_config
from packgraph.verification.ranks import verify_ranks

ALONE, CP2, CP2_DP2, CP2_PP2 = (
    Layout(dp=1),
    Layout(dp=1, cp=2),
    Layout(dp=2, cp=2),
    Layout(dp=1, cp=2, pp=2),
)
CP4, PP2, DP2 = Layout(dp=1, cp=4), Layout(dp=1, pp=2), Layout(dp=2)
CAPACITIES = SPREAD["ulysses"]
LENGTHS = {
    "mixed": (13, 1, 20, 7),
    "one document on all ranks": (47,),
    "ranks with padding only": (5,),
}
GROUPS = (1, 2, 4, 8)  # fewer than ranks, as many, more


def mixer_with(groups):
    shape = dataclasses.replace(MAMBA, num_heads=8, groups=groups, head_dim=4)
    return (
        random_hybrid(hybrid("M", mamba=shape, num_layers=1), seed=groups)
        .double()
        .layers["0"]
        .mamba
    )


def case(lengths):
    """Document ids, input and gradient of the output, of a row of 48 places."""
    ids = torch.tensor(
        [number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.int32
    )
    ids = torch.nn.functional.pad(ids, (0, 48 - len(ids)), value=-1)
    draw = torch.Generator().manual_seed(len(lengths))
    x, grad = (torch.randn(48, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    return ids, x, grad * (ids >= 0)[:, None]


def differentiate(run, mixer, ids, x, grad):
    mixer.zero_grad()
    leaf = x.clone().requires_grad_()
    out = run(leaf, ids)
    out.backward(grad)
    return [out.detach(), leaf.grad], [parameter.grad.clone() for parameter in mixer.parameters()]


def on_ranks(mesh):
    context = ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name)
    found = []
    for groups, lengths in itertools.product(GROUPS, LENGTHS.values()):
        mixer, (ids, x, grad) = mixer_with(groups), case(lengths)
        found.append(
            differentiate(
                lambda x, ids, mixer=mixer: mixer(x, ids, context),
                mixer,
                ids,
                own_rows(x, context),
                own_rows(grad, context),
            )
        )
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_on_spread_rows_are_those_of_one_process(ranks):
    """Outputs, gradients of inputs, and the sums over ranks of all parameters' gradients, in
    float64."""
    results = run_ranks(on_ranks, ranks, layout=Layout(cp=ranks))
    for number, (groups, (name, lengths)) in enumerate(itertools.product(GROUPS, LENGTHS.items())):
        mixer, (ids, x, grad) = mixer_with(groups), case(lengths)
        rows, sums = differentiate(
            lambda x, ids, mixer=mixer: naive_mixer(mixer, x, ids), mixer, ids, x, grad
        )
        live = sum(lengths)
        for part, expected in enumerate(rows):
            found = torch.cat([result[number][0][part] for result in results])
            torch.testing.assert_close(
                found[:live],
                expected[:live],
                rtol=1e-9,
                atol=1e-11,
                msg=lambda text, place=(name, groups, part): f"{place}: {text}",
            )
        for part, expected in enumerate(sums):
            found = sum(result[number][1][part] for result in results)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_heads_that_ranks_cannot_share_are_refused_with_the_reason():
    assert ranks_problem(ScanShape(8, 4, 2, 5), 4) is None
    assert "8 heads in 3 groups cannot be shared by 2 ranks" in ranks_problem(
        ScanShape(8, 4, 3, 5), 2
    )
    config = hybrid(mamba=dataclasses.replace(MAMBA, num_heads=6), num_heads=4)
    (problem,) = context_problems(config, 4)
    assert (
        "Mamba-2 layers (model.mamba): 6 heads in 2 groups cannot be shared by 4 ranks" in problem
    )
    alone = hybrid("M", num_layers=1, num_heads=1, num_kv_heads=1)
    assert not context_problems(alone, 2), "without attention its heads do not matter"


def config(layout, steps=4, *, pattern="M*-E", dropout=0.0, **graph_options):
    """A run of a hybrid of four layers on the rows of the tests of context parallelism."""
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(
        hybrid(pattern, num_layers=4, vocab_size=32, dropout=dropout, tie_embeddings=True),
        experts=dataclasses.replace(
            EXPERTS, score="sigmoid", score_bias=True, bias_rate=0.01, document_loss=0.2
        ),
    )
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, **{"capacities": CAPACITIES} | graph_options),
        parallel=ParallelConfig(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp),
        run=dataclasses.replace(made.run, tokens_per_step=90),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts."""
    with finished(Path(folder), settings, SpreadPacks("ulysses"), mesh=mesh) as run:
        return dict(collect(mesh, run.tensors())), run.executor.totals()


def ranks(layout, *arguments):
    return run_ranks(
        go, layout.dp * layout.pp * layout.cp * layout.tp, *arguments, layout=layout, seconds=200.0
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and tensors of one process."""
    folder = tmp_path_factory.mktemp("one") / "alone"
    return folder, ranks(ALONE, str(folder), config(ALONE, enabled=False))[0][0]


@pytest.mark.parametrize(
    ("layout", "granularity", "dropout"),
    [
        (CP2, "chunk", 0.0),
        (PP2, "layer", 0.0),
        pytest.param(DP2, "step", 0.0, marks=pytest.mark.slow),
        pytest.param(CP4, "layer", 0.0, marks=pytest.mark.slow),
        pytest.param(CP2, "step", 0.1, marks=pytest.mark.slow),
        pytest.param(PP2, "step", 0.1, marks=pytest.mark.slow),
        pytest.param(PP2, "chunk", 0.0, marks=pytest.mark.slow),
        pytest.param(CP2_DP2, "chunk", 0.0, marks=pytest.mark.slow),
        pytest.param(CP2_PP2, "chunk", 0.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise_and_ranks_learn_what_one_process_learns(
    layout, granularity, dropout, alone, tmp_path
):
    eager = ranks(layout, str(tmp_path / "eager"), config(layout, dropout=dropout, enabled=False))[
        0
    ][0]
    graphs = ranks(
        layout, str(tmp_path / "graphs"), config(layout, dropout=dropout, granularity=granularity)
    )
    equal(eager, graphs[0][0])
    assert all(totals["replayed"] > 0 for _, totals in graphs)
    if not dropout:
        close(eager, alone[1])
        equal_metrics(tmp_path / "eager", alone[0])


def switching(mesh, graphs):
    model = DecoderModel(dataclasses.replace(config(ALONE).model, dropout=0.1)).train()
    spread_context(model, mesh)
    batches = itertools.islice(SpreadPacks("ulysses"), 8)
    return switched(mesh, model, CAPACITIES, batches, graphs)


def test_the_number_of_ranks_may_change_with_every_microbatch():
    eager, graphs = (run_ranks(switching, 2, use, layout=CP2) for use in (False, True))
    for (expected, _), (found, (_, replayed, _)) in zip(eager, graphs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert replayed == 6


def verified(mesh, settings, layout):
    return verify_ranks(
        "hybrid",
        settings,
        lambda: switching_steps(layout),
        torch.device("cpu"),
        mesh,
        one_process=True,
    )


@pytest.mark.parametrize(
    ("layout", "granularity"),
    [
        pytest.param(CP2, "chunk", marks=pytest.mark.slow),
        pytest.param(CP4, "layer", marks=pytest.mark.slow),
        pytest.param(CP2_PP2, "chunk", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_planned_rows_over_changing_ranks_are_verified(layout, granularity):
    """The trainer's dynamic context parallelism: bitwise against eager on every rank, one process
    within rounding."""
    settings = dynamic_config(layout, granularity, 5)
    model = dataclasses.replace(
        tiny_hybrid_config(granularity, 0.1, 5).model, num_layers=max(4, 4 * layout.pp)
    )
    settings = dataclasses.replace(settings, model=model)
    reports = run_ranks(
        verified,
        layout.cp * layout.pp,
        settings,
        layout,
        layout=settings.parallel.layout(),
        seconds=200.0,
    )
    assert all(report.good for report in reports), reports[0]
    assert all(set(rank.fallbacks) <= {"warm-up"} for rank in reports[0].ranks)


def one_document_changed(mesh):
    """Loss gradient of the hidden states with one document's tokens changed, and without; this
    rank's rows. Without experts: a CPU's products choose by the number of an expert's rows, which
    tokens of other documents are among."""
    model = random_hybrid(hybrid("M-M*-M"))
    spread_context(model, mesh)
    draw, found = random.Random(1), []
    documents = [[draw.randrange(1, 40) for _ in range(length)] for length in (9, 20, 3)]
    for changed in (False, True):
        words = [documents[0], [1] * 20 if changed else documents[1], documents[2]]
        batch = PackedBatch.build(words, Capacity(48, 4))
        state = model.begin(batch)
        first, *others = model.stages()
        state = first.run(state)
        state["hidden"] = leaf = state["hidden"].detach().requires_grad_()
        for stage in others:
            state = stage.run({**state, "tokens_in_step": torch.tensor(29)})
        state["output"].backward()
        found.append(leaf.grad.clone())
    return found


def test_a_changed_document_leaves_the_bits_of_others():
    results = run_ranks(one_document_changed, 2, layout=CP2)
    before, after = (torch.cat([result[side] for result in results]) for side in range(2))
    others = torch.tensor([row < 9 or 29 <= row < 32 for row in range(48)])
    assert torch.equal(before[others], after[others]) and not torch.equal(
        before[~others], after[~others]
    )


def test_what_cannot_be_is_refused_with_reasons():
    tensor = validate(config(Layout(dp=1, tp=2)), "cpu", world=2)
    assert any(
        "attention and SwiGLU only, not with model.pattern 'M*-E'" in problem for problem in tensor
    )
    three = validate(config(Layout(dp=1, cp=3), capacities=CAPACITIES), "cpu", world=3)
    assert any("4 heads in 2 groups cannot be shared by 3 ranks" in problem for problem in three)
    assert not validate(config(CP4), "cpu", world=4)
