"""Runs of a decoder with experts over ranks that share them: graphs equal eager bitwise, layouts
equal one process, and a step that lacks room on one rank is made again on all."""

import contextlib
import dataclasses
import random
from pathlib import Path

import pytest
from distkit import run_ranks
from trainkit import RandomPacks, close, equal, tiny, trainer

from packgraph.models.config import ExpertConfig
from packgraph.models.layers.moe import moe_blocks
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

ALONE, EP2 = Layout(dp=1), Layout(dp=2, ep=2)
PP2_EP2, EP2_EDP2, EP4 = Layout(dp=2, pp=2, ep=2), Layout(dp=4, ep=2), Layout(dp=4, ep=4)
EXPERTS = ExpertConfig(
    count=8,
    per_token=2,
    intermediate_size=16,
    shared=1,
    score="sigmoid",
    score_bias=True,
    bias_rate=0.01,
)
CAPACITIES = (Capacity(32, 4), Capacity(64, 8))
STEPS = 5  # two of warm-up


class Packs(RandomPacks):
    """Packs of one capacity after the other, so that few kinds of steps have to be captured."""

    def __next__(self):
        draw = random.Random(self.position)
        capacity = CAPACITIES[self.position // 2 % 2]
        self.position += 1
        lengths = [draw.randint(2, capacity.tokens // 4) for _ in range(3)] + [capacity.tokens // 4]
        return pack(
            [[draw.randrange(32) for _ in range(length)] for length in lengths], [capacity]
        )[0]


def config(layout, steps=STEPS, *, dropout=0.0, dispatcher="auto", room=4.0, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(made.model, dropout=dropout, experts=EXPERTS)
    return dataclasses.replace(
        made,
        model=model,
        graph=dataclasses.replace(made.graph, capacities=CAPACITIES, **graph),
        parallel=ParallelConfig(
            dp=layout.dp, pp=layout.pp, ep=layout.ep, dispatcher=dispatcher, expert_room=room
        ),
        run=dataclasses.replace(made.run, tokens_per_step=90),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20),
    )


def go(mesh, folder, settings, resume=False, crowded=None):
    """Run to the end. crowded: a rank that seems to lack room for experts in its fourth step.

    At last: all tensors whole on rank 0, graph counts, steps made again, factors of room.
    """
    with contextlib.closing(trainer(Path(folder), settings, Packs(), mesh=mesh)) as run:
        if crowded == mesh.rank:
            crowd(run)
        if resume:
            run.resume()
        run.run(StopRequest())
        factors = [
            getattr(block.dispatcher, "factor", None) for block in moe_blocks(run.model.chunks)
        ]
        return (
            dict(collect(mesh, run.tensors())),
            run.executor.totals(),
            run.repeated,
            factors,
        )


def crowd(run):
    """Make the demand of one layer look larger than its room once: nothing is lacking in truth, so
    that the run can be compared with one where nothing happens."""
    before, calls = run.executor.train_step, []

    def train_step(*arguments):
        calls.append(None)
        if len(calls) == 4:
            moe_blocks(run.model.chunks)[0].demand.fill_(4500)
        return before(*arguments)

    run.executor.train_step = train_step


def ranks(layout, *arguments):
    return run_ranks(go, (layout.dp or 1) * layout.pp, *arguments, layout=layout, seconds=120.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folder and tensors of one process."""
    folder = tmp_path_factory.mktemp("one") / "alone"
    return folder, ranks(ALONE, str(folder), config(ALONE))[0][0]


@pytest.mark.parametrize(
    ("layout", "granularities"),
    [
        (EP2, ("layer", "step")),
        (PP2_EP2, ("chunk",)),
        pytest.param(EP2, ("chunk",), marks=pytest.mark.slow),
        pytest.param(PP2_EP2, ("layer", "step"), marks=pytest.mark.slow),
        pytest.param(EP4, ("layer", "chunk", "step"), marks=pytest.mark.slow),
        pytest.param(EP2_EDP2, ("layer", "chunk", "step"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_graphs_equal_eager_bitwise(layout, granularities, tmp_path):
    eager, *_ = ranks(layout, str(tmp_path / "eager"), config(layout, dropout=0.1, enabled=False))
    for granularity in granularities:
        graphs = ranks(
            layout,
            str(tmp_path / granularity),
            config(layout, dropout=0.1, granularity=granularity),
        )
        equal(eager[0], graphs[0][0])
        assert all(totals["replayed"] > 0 for _, totals, *_ in graphs)


@pytest.mark.parametrize(
    ("layout", "dispatcher", "scope"),
    [
        (EP2, "padded", None),
        (EP2, "host_splits", ("attn", "moe_router")),
        pytest.param(PP2_EP2, "padded", None, marks=pytest.mark.slow),
        pytest.param(EP2_EDP2, "padded", None, marks=pytest.mark.slow),
        pytest.param(EP4, "padded", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharing_experts_learns_what_one_process_learns(layout, dispatcher, scope, alone, tmp_path):
    folder, expected = alone
    close(
        ranks(layout, str(tmp_path / "shared"), config(layout, dispatcher=dispatcher, scope=scope))[
            0
        ][0],
        expected,
    )
    for ours, theirs in zip(
        read_metrics(tmp_path / "shared" / METRICS), read_metrics(folder / METRICS), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_the_load_of_a_step_is_that_of_all_ranks(tmp_path):
    """The loss against it is that of one process, and graphs equal eager."""
    experts = dataclasses.replace(EXPERTS, batch_loss=0.3)

    def settings(layout, **options):
        made = config(layout, **options)
        return dataclasses.replace(made, model=dataclasses.replace(made.model, experts=experts))

    expected = ranks(ALONE, str(tmp_path / "alone"), settings(ALONE))[0][0]
    graphs = ranks(EP2, str(tmp_path / "graphs"), settings(EP2))[0][0]
    equal(ranks(EP2, str(tmp_path / "eager"), settings(EP2, enabled=False))[0][0], graphs)
    close(graphs, expected)
    loads = [value for name, value in graphs.items() if name.endswith(".step_load")]
    assert loads and all(load.sum() > 0 for load in loads)


@pytest.mark.parametrize("granularity", ["layer", pytest.param("step", marks=pytest.mark.slow)])
def test_what_lacks_room_on_one_rank_is_made_again_on_all(granularity, tmp_path):
    """Bitwise the run in which nothing was lacking: parameters, optimizer state, biases, random
    numbers, metrics."""
    settings = config(EP2, dropout=0.1, granularity=granularity)
    calm = ranks(EP2, str(tmp_path / "calm"), settings)
    crowded = ranks(EP2, str(tmp_path / "crowded"), settings, False, 1)
    equal(calm[0][0], crowded[0][0])
    assert [again for *_, again, _ in crowded] == [2, 2], (
        "the step, and the one that was launched after it"
    )
    assert all(factor == pytest.approx(4.95) for *_, factors in crowded for factor in factors)
    losses = [
        [
            (row["step"], row["loss"], row["gradient_norm"])
            for row in read_metrics(tmp_path / name / METRICS)
        ]
        for name in ("calm", "crowded")
    ]
    assert losses[0] == losses[1]


def test_a_small_room_grows_until_it_suffices(alone, tmp_path):
    first, second = ranks(EP2, str(tmp_path / "tight"), config(EP2, room=1.0, granularity="chunk"))
    close(first[0], alone[1])
    assert first[2] > 0 and first[3] == second[3] and min(first[3]) > 1.0
    longer = config(EP2, STEPS + 1, room=1.0, granularity="chunk")
    resumed, _ = ranks(EP2, str(tmp_path / "tight"), longer, True)
    assert resumed[2] == 0 and resumed[3] == first[3], "it begins with the room that it had at last"


def test_a_checkpoint_moves_between_numbers_of_ranks_that_share_experts(alone, tmp_path):
    folder = str(tmp_path / "moved")
    ranks(EP2, folder, config(EP2, 3))
    close(ranks(ALONE, folder, config(ALONE), True)[0][0], alone[1])


def test_a_run_that_goes_on_is_bitwise_the_run_that_never_stopped(tmp_path):
    whole, *_ = ranks(EP2, str(tmp_path / "whole"), config(EP2, dropout=0.1, granularity="chunk"))
    ranks(EP2, str(tmp_path / "parts"), config(EP2, 3, dropout=0.1, granularity="chunk"))
    parts, *_ = ranks(
        EP2, str(tmp_path / "parts"), config(EP2, dropout=0.1, granularity="chunk"), True
    )
    equal(whole[0], parts[0])


def test_what_cannot_be_is_refused_with_reasons():
    settings = config(EP2, dispatcher="host_splits", scope=("moe_router", "moe_preprocess"))
    assert any("makes the host wait" in problem for problem in validate(settings, "cpu", world=2))
    dense = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, experts=ExpertConfig()),
        graph=dataclasses.replace(settings.graph, scope=None),
    )
    assert any("model.experts.count is 0" in problem for problem in validate(dense, "cpu", world=2))
    with pytest.raises(ValueError, match="local sends nothing"):
        ParallelConfig(ep=2, dispatcher="local")
