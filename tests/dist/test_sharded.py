"""Sharded layers: the same numbers as replicas that keep everything, through graphs and eagerly."""

import pytest
import torch
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


@pytest.mark.dist
def test_four_replicas_are_those_of_replicas_within_rounding():
    """Sums of four gradients are added in an order of gloo's own, which parts share."""
    kinds = [("none", False), ("parameters", False), ("parameters", True)]
    for plain, eager, graph in run_ranks(run_kinds, 4, kinds, {"packs": 5, "alike": True}, {}):
        assert graph["replayed"] and not differences(eager, graph)
        for ours, theirs in zip(eager["trace"], plain["trace"], strict=True):
            torch.testing.assert_close(ours["norm"], theirs["norm"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-4, atol=1e-6)


CASES = {
    "frozen embedding": ({"freeze": "embed_tokens"}, {}),
    "frozen below": ({"freeze": "layers.0."}, {"model": {"tie_embeddings": False}}),
    "recomputed": ({}, {"run": {"recompute": "full"}}),
    "recomputed cheaply": ({}, {"run": {"recompute": "selective"}}),
    "narrow": ({}, {"run": {"dtype": "bfloat16"}}),
    "one layer": ({}, {"model": {"num_layers": 1}}),
    "scope": ({}, {"graph_options": {"scope": ("mlp",), "granularity": "layer"}}),
    "scope of both": ({}, {"graph_options": {"scope": ("attn", "mlp")}}),
    "no clipping": ({}, {"optimizer": {"clip_norm": None}}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_combinations(case):
    """Eager equals replicas with a microbatch each, graphs equal eager."""
    options, changes = CASES[case]
    kinds = [("none", False), ("parameters", False), ("parameters", True)]
    options = {"packs": 2, "alike": True, "steps": 5, **options}
    for plain, eager, graph in run_ranks(run_kinds, 2, kinds, options, changes):
        assert not differences(plain, eager)
        assert graph["replayed"] and not differences(eager, graph)
