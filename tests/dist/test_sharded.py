"""Sharded layers: the same numbers as replicas that keep everything, through graphs and eagerly."""

import pytest
from distkit import run_ranks
from shardedkit import differences, settings, train


def run_kinds(mesh, kinds, options, changes):
    return [
        train(
            mesh,
            settings(shard, graph=graph, **{k: dict(v) for k, v in changes.items()}),
            **options,
        )
        for shard, graph in kinds
    ]


@pytest.mark.dist
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_eager_equals_replicas_bitwise(shard):
    kinds = [("none", False), (shard, False)]
    for plain, sharded in run_ranks(run_kinds, 2, kinds, {"packs": 2, "alike": True}, {}):
        assert not differences(plain, sharded)


@pytest.mark.dist
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_graphs_equal_eager_bitwise(shard, granularity):
    changes = {"graph_options": {"granularity": granularity, "strict": True}}
    kinds = [(shard, False), (shard, True)]
    options = {"packs": 3, "uneven": True}
    for eager, graph in run_ranks(run_kinds, 2, kinds, options, changes):
        assert graph["replayed"] >= 3 and not differences(eager, graph)
