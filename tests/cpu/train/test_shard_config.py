"""What sharded layers are refused with, before any process group exists."""

import dataclasses

import pytest
from trainkit import tiny

from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.validate import validate

SHARDED = ParallelConfig(shard="parameters")


def problems(config, world=2):
    return [text for text in validate(config, "cpu", world=world) if "parallel.shard" in text]


def test_plain_replicas_may_be_sharded():
    for graph in (False, True):
        assert not problems(dataclasses.replace(tiny(graph=graph), parallel=SHARDED))


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_so_may_those_that_share_a_model_otherwise(sizes):
    parallel = dataclasses.replace(SHARDED, **sizes)
    assert not problems(dataclasses.replace(tiny(), parallel=parallel), world=4)


@pytest.mark.parametrize(
    ("ranks", "sizes", "world", "reason"),
    [
        (2, {}, 4, None),
        (8, {}, 8, None),
        (2, {"tp": 2, "pp": 2}, 16, None),
        (4, {"cp": 2}, 8, None),
        (3, {}, 4, "does not divide the 4 ranks"),
        (8, {}, 4, "does not divide the 4 ranks"),
        (6, {"cp": 4}, 12, "cp 4: one must divide"),
        (6, {"ep": 4}, 12, "ep 4: one must divide"),
    ],
)
def test_ranks_that_share_layers_must_fit_the_others(ranks, sizes, world, reason):
    parallel = dataclasses.replace(SHARDED, shard_ranks=ranks, **sizes)
    found = parallel.layout().problems(world)
    assert bool(found) == (reason is not None), found
    assert reason is None or reason in found[0]
    if not sizes.get("ep"):  # a model of experts has more to say
        config = dataclasses.replace(tiny(), parallel=parallel)
        told = [text for text in validate(config, "cpu", world=world) if "shard_ranks" in text]
        assert told == [f"parallel: {text}" for text in found]


@pytest.mark.parametrize(("ranks", "shard"), [(1, "parameters"), (-1, "gradients"), (2, "none")])
def test_ranks_that_share_nothing_are_refused(ranks, shard):
    with pytest.raises(ValueError, match=f"shard_ranks.*{ranks}"):
        ParallelConfig(shard=shard, shard_ranks=ranks)


@pytest.mark.parametrize(
    ("layout", "dense", "experts"),
    [
        (Layout(dp=16, shard_ranks=8), 8, 8),
        (Layout(dp=16, ep=2, shard_ranks=8), 8, 4),
        (Layout(dp=16, ep=16, shard_ranks=8), 8, 1),
        (Layout(dp=8, cp=2, ep=8, shard_ranks=8), 8, 2),
        (Layout(dp=4, cp=4, ep=2, shard_ranks=2), 2, 2),
        (Layout(dp=16, ep=2), 16, 8),
    ],
    ids=str,
)
def test_groups_that_share_layers_cover_all_ranks(layout, dense, experts):
    """Of as many ranks as `sharers` says, with every rank once, and all of one group in a block."""
    assert (layout.sharers(), layout.sharers(experts=True)) == (dense, experts)
    if not layout.shard_ranks:
        return
    found = layout.sharing_ranks()
    for axis, size in (("copies", dense), ("expert_copies", experts)):
        if axis == "expert_copies" and layout.ep == 1:
            assert f"{axis} shard" not in found
            continue
        for which in ("shard", "across"):
            groups = found[f"{axis} {which}"]
            assert sorted(rank for ranks in groups for rank in ranks) == list(range(16))
        assert {len(ranks) for ranks in found[f"{axis} shard"]} == {size}
        blocks = [{rank // layout.shard_ranks for rank in g} for g in found[f"{axis} shard"]]
        assert all(len(block) == 1 for block in blocks)
        apart = [[r // layout.shard_ranks for r in g] for g in found[f"{axis} across"]]
        alike = 16 // (size if axis == "copies" else size * layout.ep)
        assert all(len(set(blocks)) == len(blocks) == alike for blocks in apart)


def test_adapters_have_no_gradients_to_share():
    lora = dataclasses.replace(tiny().lora, rank=2)
    for shard, refused in (("gradients", True), ("parameters", False)):
        parallel = dataclasses.replace(SHARDED, shard=shard)
        config = dataclasses.replace(tiny(), lora=lora, parallel=parallel)
        assert bool(problems(config)) == refused


def test_all_reasons_come_at_once():
    config = dataclasses.replace(
        tiny(graph=True),
        parallel=dataclasses.replace(SHARDED, cp=2, dynamic_cp=True, shard="gradients"),
    )
    config = dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, granularity="step")
    )
    found = problems(config)
    assert all("parallel.shard = gradients" in text for text in found)
    for name in ("dynamic_cp", "without graph.optimizer"):
        assert any(name in text for text in found), name
