"""What sharded layers are refused with, before any process group exists."""

import dataclasses

import pytest
from trainkit import tiny

from packgraph.train.config.sections import OffloadConfig, ParallelConfig
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


def test_all_reasons_come_at_once():
    config = dataclasses.replace(
        tiny(graph=True, recompute="auto"),
        parallel=dataclasses.replace(SHARDED, cp=2, dynamic_cp=True, shard="gradients"),
        offload=OffloadConfig(modules=("mlp_act",)),
    )
    config = dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, granularity="step")
    )
    found = problems(config)
    assert all("parallel.shard = gradients" in text for text in found)
    for name in ("dynamic_cp", "without graph.optimizer", "offload", "run.recompute"):
        assert any(name in text for text in found), name
