"""Training experts in one process: the stash changes no bit, too few pages are a step that is made
again."""

import dataclasses
import weakref
from contextlib import closing

import pytest
import torch
from trainkit import CAPACITIES, CPU, PacksOfOneCapacity, RandomPacks, equal, tiny, traced, trainer

from packgraph.models.config import ExpertConfig, LatentConfig
from packgraph.models.layers.moe import MoEBlock, moe_blocks
from packgraph.moe.dispatch.over_ranks import PaddedDispatcher
from packgraph.moe.stash.plan import pages_for
from packgraph.moe.stash.stash import Stash
from packgraph.offloading.group import SavedGroup
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import single_process
from packgraph.train.build import build_chunks
from packgraph.train.config.reading import to_dict
from packgraph.train.config.sections import OffloadConfig, ParallelConfig
from packgraph.train.features.moe import (
    all_pages,
    make_stash,
    planned_pages,
    restore_room,
    room_of_experts,
    share,
)
from packgraph.train.run_files import write_json
from packgraph.train.run_folder import CONFIG, check_same_run
from packgraph.train.signals import StopRequest
from packgraph.train.validate import validate

EXPERTS = ExpertConfig(
    count=8,
    per_token=2,
    intermediate_size=16,
    shared=1,
    first_dense=1,
    score="sigmoid",
    score_bias=True,
    bias_rate=0.01,
    document_loss=1e-3,
)


def config(steps=6, stash=0.0, of_stash=None, **graph):
    """Of one capacity, unless told otherwise: shapes are the matter of one test alone."""
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    model = dataclasses.replace(
        made.model,
        num_layers=3,
        dropout=0.1,
        experts=EXPERTS,
        latent=LatentConfig(kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8),
    )
    return dataclasses.replace(
        made,
        model=model,
        graph=dataclasses.replace(made.graph, **({"capacities": CAPACITIES[-1:]} | graph)),
        parallel=ParallelConfig(expert_stash=stash, **(of_stash or {})),
    )


def trainer_of(folder, settings):
    """With packs of the capacities that are captured."""
    several = len(settings.graph.capacities) > 1
    return trainer(folder, settings, RandomPacks() if several else PacksOfOneCapacity())


def go(folder, settings, pages=None, resume=False):
    """Train to the end: all tensors, summary, and how many steps were made again. pages: of the
    stash at first."""
    with closing(trainer_of(folder, settings)) as run:
        blocks = moe_blocks(run.model.chunks)
        if pages is not None:
            allocate(blocks, pages)
        if resume:
            run.resume()
        run.run(StopRequest())
        return (
            {name: value.clone() for name, value in run.tensors().items()},
            run.executor.totals(),
            run.repeated,
        )


def allocate(blocks, *pages):
    """Let the stash of these blocks have these pages: on the device and on the host."""
    stash = blocks[0].stash
    stash.allocate(*pages, columns=dict(stash.columns))
    share(stash, blocks)


@pytest.fixture(scope="module")
def eager_of_four(tmp_path_factory):
    """Tensors after four eager steps."""
    return go(tmp_path_factory.mktemp("eager") / "run", config(4, enabled=False))[0]


@pytest.fixture(scope="module")
def eager_of_several_shapes(tmp_path_factory):
    """Tensors after eager steps with batches of several capacities."""
    settings = config(enabled=False, capacities=CAPACITIES)
    return go(tmp_path_factory.mktemp("eager") / "run", settings)[0]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """Tensors after eager steps."""
    return go(tmp_path_factory.mktemp("eager") / "run", config(enabled=False))[0]


@pytest.mark.parametrize(
    "granularity",
    ["layer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunk", "step"))],
)
def test_biases_and_graphs_of_every_granularity_equal_eager(
    granularity, eager_of_several_shapes, tmp_path
):
    expected = eager_of_several_shapes
    assert any(
        name.endswith("e_score_correction_bias") and value.abs().max() > 0
        for name, value in expected.items()
    )
    settings = config(granularity=granularity, stash=1.2, capacities=CAPACITIES)
    found, totals, again = go(tmp_path / "run", settings)
    equal(expected, found)
    assert totals["replayed"] > 0 and again == 0


def with_batch_loss(factor, **options):
    made = config(**options)
    experts = dataclasses.replace(EXPERTS, batch_loss=factor, score_bias=False, document_loss=0.0)
    return dataclasses.replace(made, model=dataclasses.replace(made.model, experts=experts))


@pytest.fixture(scope="module")
def eager_with_loss(tmp_path_factory):
    """Tensors after eager steps with the loss against the load of the step before."""
    folder = tmp_path_factory.mktemp("eager") / "run"
    return go(folder, with_batch_loss(0.5, enabled=False))[0]


@pytest.mark.parametrize("granularity", [pytest.param("layer", marks=pytest.mark.slow), "step"])
def test_the_loss_against_the_load_of_the_step_before_is_that_of_eager(
    granularity, eager_with_loss, tmp_path
):
    found, totals, _ = go(tmp_path / "run", with_batch_loss(0.5, granularity=granularity))
    equal(eager_with_loss, found)
    assert totals["replayed"] > 0


def test_the_loss_against_the_load_of_the_step_before_trains_routers_and_goes_on(
    eager_with_loss, tmp_path
):
    expected = eager_with_loss
    without, *_ = go(tmp_path / "without", with_batch_loss(0.0, enabled=False))
    routers = [name for name in without if name.endswith("gate.weight")]
    assert any(not torch.equal(expected[name], without[name]) for name in routers)
    assert all("step_load" not in name for name in without)
    loads = [value for name, value in expected.items() if name.endswith(".step_load")]
    assert len(loads) == 2 and all(load.sum() > 0 for load in loads)
    go(tmp_path / "parts", with_batch_loss(0.5, steps=3, enabled=False))
    equal(go(tmp_path / "parts", with_batch_loss(0.5), resume=True)[0], expected)


def test_a_step_that_is_made_again_has_the_load_of_the_same_step_before(eager_with_loss, tmp_path):
    expected = eager_with_loss
    found, _, again = go(tmp_path / "few", with_batch_loss(0.5, stash=1.0), pages=1)
    equal(expected, found)
    assert again >= 1


OF_STASH = [
    {"expert_stash_page_rows": 16},
    {"expert_stash_host": 1.0},
    {"expert_stash_resident": True},
]


@pytest.mark.parametrize(
    ("of_stash", "granularity"),
    [
        pytest.param(
            options,
            granularity,
            id=f"{next(iter(options))}-{granularity}",
            marks=[] if granularity == quick else pytest.mark.slow,
        )
        for options, quick in zip(OF_STASH, ("layer", "step", "layer"), strict=True)
        for granularity in ("layer", "step")
    ],
)
def test_options_of_the_stash_change_no_bit(of_stash, granularity, eager_of_four, tmp_path):
    expected = eager_of_four
    settings = config(4, stash=0.2 if "expert_stash_host" in of_stash else 1.2, of_stash=of_stash)
    graph = dataclasses.replace(settings.graph, granularity=granularity)
    with closing(trainer_of(tmp_path / "run", dataclasses.replace(settings, graph=graph))) as run:
        blocks = moe_blocks(run.model.chunks)
        stash = blocks[0].stash
        run.run(StopRequest())
        equal(expected, run.tensors())
        assert run.executor.totals()["replayed"] > 0
        if "expert_stash_page_rows" in of_stash:
            assert stash.page_rows == 16 and stash.need_hi() > 8
        elif "expert_stash_host" in of_stash:
            assert 0 < stash.spilled_hi() <= stash.pages.host_pages
        else:
            assert [block.stash for block in blocks] == [stash, None]
            assert 0 < stash.need_hi() <= stash.pages.pages


def test_pages_that_were_too_few_are_added_on_the_host_where_there_is_such_a_tier(
    eager_of_four, tmp_path
):
    expected = eager_of_four
    settings = config(4, stash=0.1, of_stash={"expert_stash_host": 0.9})
    with closing(trainer_of(tmp_path / "few", settings)) as run:
        blocks = moe_blocks(run.model.chunks)
        allocate(blocks, 1, 1)
        run.run(StopRequest())
        equal(expected, run.tensors())
        assert run.repeated >= 1
        pages = blocks[0].stash.pages
        assert pages.pages == 1 and pages.host_pages > 1


def test_a_run_goes_on_bitwise_with_another_stash(tmp_path):
    whole, *_ = go(tmp_path / "whole", config(5, enabled=False))
    go(tmp_path / "parts", config(3, enabled=False))
    other = {"expert_stash_host": 1.0, "expert_stash_page_rows": 16, "expert_stash_resident": True}
    settings = config(5, stash=0.2, of_stash=other)
    write_json(tmp_path / "parts" / CONFIG, to_dict(config(3)))
    check_same_run(tmp_path / "parts", settings)
    equal(go(tmp_path / "parts", settings, resume=True)[0], whole)


def test_a_run_goes_on_with_the_pages_it_had_on_the_host():
    settings = config(stash=0.5, of_stash={"expert_stash_host": 0.5})
    model = build_chunks(settings, CPU, single_process())
    stash = make_stash(model, settings, single_process(), CPU)
    planned, device = all_pages(stash), stash.pages.pages
    assert 0 < device < planned
    assert room_of_experts(model, settings, single_process())["pages"] == 1
    assert restore_room(model, settings, single_process(), {"pages": 3.0})
    assert stash.pages.pages == device and all_pages(stash) == 3 * planned
    assert room_of_experts(model, settings, single_process())["pages"] == 3


def test_options_of_a_stash_that_make_no_sense_are_refused_with_all_reasons():
    with pytest.raises(ValueError) as caught:
        ParallelConfig(
            expert_stash_host=0.5, expert_stash_page_rows=24, expert_stash_resident=True, pp=2
        )
    for text in (
        "is for what finds no page on the device",
        "multiple of 16",
        "expert_stash_resident is of a stash",
        "expert_stash_resident with pp = 2",
    ):
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="together at least 1"):
        ParallelConfig(expert_stash=0.5, expert_stash_host=0.4)
    with pytest.raises(ValueError, match="expert_stash must be 0 or at least 1"):
        ParallelConfig(expert_stash=0.5)
    settings = config(stash=1.0, of_stash={"expert_stash_resident": True})
    assert not validate(settings, "cpu")
    one = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=2))
    assert any("model with one layer of experts" in text for text in validate(one, "cpu"))


@pytest.mark.parametrize(
    "granularity", [pytest.param("layer", marks=pytest.mark.slow), "chunk", "step"]
)
def test_too_few_pages_are_a_step_made_again(granularity, eager, tmp_path):
    expected = eager
    found, _, again = go(tmp_path / "few", config(granularity=granularity, stash=1.0), pages=1)
    equal(expected, found)
    assert again >= 1


@pytest.mark.slow
def test_too_few_pages_of_compiled_code_are_a_step_made_again(tmp_path):
    with traced():
        expected, *_ = go(tmp_path / "plain", of_one_layer(0.0))
        found, totals, again = go(tmp_path / "few", of_one_layer(1.0), pages=1)
    equal(expected, found)
    assert again >= 1 and totals["replayed"] > 0


def of_one_layer(stash, offload=()):
    """Compiled code of a layer with experts, of which all that it saves may move."""
    made = config(steps=4, stash=stash, compile=True, capacities=(Capacity(64, 8),), warmup=1)
    model = dataclasses.replace(
        made.model,
        num_layers=1,
        experts=dataclasses.replace(EXPERTS, first_dense=0),
        latent=LatentConfig(),
    )
    knobs = OffloadConfig(modules=offload, min_bytes=1, margin=0)
    return dataclasses.replace(made, model=model, offload=knobs)


@pytest.mark.slow
@pytest.mark.parametrize("held", [True, False], ids=["held", "control"])
def test_compiled_layers_with_a_stash_are_offloaded_but_for_its_pages(held, tmp_path, monkeypatch):
    """Without the stash's word (control) its pages move, too: they are saved for the backward."""
    packed, pages = set(), set()

    def pack(group, tensor, *rest, pack=SavedGroup.pack):
        packed.add(tensor.untyped_storage().data_ptr())
        return pack(group, tensor, *rest)

    def memory(stash, *arguments, memory=Stash._memory):
        made = memory(stash, *arguments)
        pages.update(buffer.untyped_storage().data_ptr() for buffer in made)
        return made

    monkeypatch.setattr(SavedGroup, "pack", pack)
    monkeypatch.setattr(Stash, "_memory", memory)
    if not held:
        monkeypatch.setattr(MoEBlock, "held_memory", lambda block: [])
    settings = of_one_layer(1.2, ("core_attn",))
    assert not validate(settings, "cpu")
    with traced():
        found, totals, _ = go(tmp_path / "moved", settings)
    assert pages and packed and totals["replayed"] > 0
    if not held:
        assert packed & pages
        return
    assert not packed & pages
    with traced():
        equal(go(tmp_path / "kept", of_one_layer(1.2))[0], found)


def test_pages_are_for_the_microbatches_that_are_in_flight(tmp_path):
    """One at a time where there is no pipeline: every page more is memory wasted."""
    settings = config(stash=1.0, granularity="layer")
    with closing(trainer_of(tmp_path / "run", settings)) as run:
        blocks = moe_blocks(run.model.chunks)
        tokens = max(capacity.tokens for capacity in settings.graph.packing_capacities())
        expected = pages_for(
            tokens, EXPERTS.per_token, len(blocks), 1, 1.0, blocks[0].stash.page_rows
        )
        assert blocks[0].stash.pages.pages == expected


@pytest.mark.parametrize("granularity", ["layer", pytest.param("step", marks=pytest.mark.slow)])
def test_old_pages_are_gone_before_there_are_new_ones(granularity, tmp_path, monkeypatch):
    """They may be most of the memory, so that both together have no room."""
    made, alive, memory = [], [], Stash._memory

    def watched(stash, column, pages, device):
        alive.append(sum(old() is not None for old in made if old not in fresh))
        found = memory(stash, column, pages, device)
        fresh.extend(weakref.ref(buffer.untyped_storage()) for buffer in found)
        made.extend(fresh)
        return found

    def allocate(stash, *arguments, allocate=Stash.allocate, **named):
        fresh.clear()
        allocate(stash, *arguments, **named)

    fresh = []
    monkeypatch.setattr(Stash, "_memory", watched)
    monkeypatch.setattr(Stash, "allocate", allocate)
    _, _, again = go(tmp_path / "few", config(granularity=granularity, stash=1.0), pages=1)
    assert again >= 1 and alive and max(alive) == 0


def test_a_rank_of_a_context_has_pages_for_its_own_rows():
    """Rows are spread over the ranks of a context, and so is what their experts keep."""
    pages = []
    for ranks in (1, 2):
        settings = config(stash=1.0)
        settings = dataclasses.replace(
            settings, parallel=dataclasses.replace(settings.parallel, cp=ranks)
        )
        model = build_chunks(
            dataclasses.replace(settings, parallel=ParallelConfig()), CPU, single_process()
        )
        pages.append(make_stash(model, settings, single_process(), CPU).pages.pages)
        tokens = max(capacity.tokens for capacity in settings.graph.packing_capacities()) // ranks
        layers = len(moe_blocks(model.chunks))
        assert pages[-1] == pages_for(tokens, EXPERTS.per_token, layers, 1, 1.0, 64)
    assert pages[1] < pages[0]


def test_a_run_goes_on_with_the_pages_it_had_at_last(tmp_path):
    """More than were planned, as after an overflow: whatever the configuration plans, it has as
    many again."""
    settings, pages = config(steps=3, stash=1.0, warmup=1), {}
    for resume in (False, True):
        options = dataclasses.replace(settings.run, steps=5 if resume else 3)
        settings = dataclasses.replace(settings, run=options)
        with closing(trainer_of(tmp_path / "run", settings)) as run:
            blocks = moe_blocks(run.model.chunks)
            stash = blocks[0].stash
            pages["planned"] = stash.pages.pages
            if resume:
                run.resume()
            else:
                allocate(blocks, 3 * stash.pages.pages + 1)
            run.run(StopRequest())
            pages[resume] = stash.pages.pages
            assert run.repeated == 0 and run.executor.totals()["replayed"] > 0
    assert pages[False] == pages[True] == 3 * pages["planned"] + 1


def test_room_is_what_it_is_of_a_balanced_load():
    """At a capacity of twice the tokens twice the pages; what is configured and larger stays;
    nothing needs nothing."""
    settings = config(stash=1.0)
    model = build_chunks(settings, CPU, single_process())
    stash = make_stash(model, settings, single_process(), CPU)
    planned = stash.pages.pages
    stash.allocate(2 * planned, columns=dict(stash.columns))
    saved = room_of_experts(model, settings, single_process())
    assert saved == {"rows": 0.0, "pages": 2.0}
    for tokens, stashed, expected in (
        (64, 1.0, 2 * planned),
        (128, 1.0, None),
        (64, 3.0, None),
        (64, 0.0, 0),
    ):
        other = config(stash=stashed, capacities=(Capacity(tokens, 8),))
        model = build_chunks(other, CPU, single_process())
        stash = make_stash(model, other, single_process(), CPU)
        balanced = planned_pages(model, other, single_process(), 1.0, 64)
        given = 0 if stash is None else stash.pages.pages
        told = restore_room(model, other, single_process(), saved)
        found = 0 if stash is None else stash.pages.pages
        assert found == max(given, 2 * balanced if stashed else 0) and (
            expected is None or found == expected
        )
        assert (
            bool(told) == (found > given) and restore_room(model, other, single_process(), {}) == []
        )


def test_rows_go_to_every_layer_but_no_more_than_there_can_be_need_for():
    class OfFour(PaddedDispatcher):
        most_factor = 4.0

    settings = config()
    model = build_chunks(settings, CPU, single_process())
    blocks = moe_blocks(model.chunks)
    for rows, configured, expected in (
        (2.5, 1.5, 2.5),
        (2.5, 3.0, 3.0),
        (7.0, 1.5, 4.0),
        (0.0, 1.5, 1.5),
    ):
        for block in blocks:
            block.dispatcher = OfFour(EXPERTS.count, None, configured)
        told = restore_room(model, settings, single_process(), {"rows": rows})
        assert [block.dispatcher.factor for block in blocks] == [expected] * len(blocks)
        assert bool(told) == (expected > configured)
        assert room_of_experts(model, settings, single_process()) == {
            "rows": expected,
            "pages": 0.0,
        }
