"""Adapters over a sharded model: the frozen weights are gathered, and only adapters' gradients are
sent."""

from unittest import mock

import pytest
from distkit import CPU, run_ranks
from shardedkit import broken, settings, train
from tracekit import differences

from packgraph.parallel import sharded_layers
from packgraph.parallel.sharded_layers import ShardedLayer
from packgraph.train.build import build_chunks, make_optimizer

pytest.importorskip("peft")
SMALL, LARGE = {"rank": 1}, {"rank": 8}  # adapters that stay whole, and that are sharded, too
WIDE = {"hidden_size": 32, "intermediate_size": 64}


def run_kinds(mesh, kinds, options, changes):
    return [
        train(
            mesh,
            settings(shard, graph=graph, **{k: dict(v) for k, v in changes.items()}),
            **options,
        )
        for shard, graph in kinds
    ]


CASES = {
    "whole adapters": ({"packs": 5, "uneven": True}, {"lora": SMALL}),
    "chunks": ({"packs": 2}, {"lora": SMALL, "graph_options": {"granularity": "chunk"}}),
    "large adapters": ({"packs": 2}, {"lora": LARGE}),
    "magnitudes": ({"packs": 2}, {"lora": SMALL | {"dora": True}}),
    "ends": ({"packs": 2}, {"lora": SMALL, "model": WIDE | {"tie_embeddings": False}}),
    "some": ({"packs": 2}, {"lora": SMALL | {"targets": ("up_proj",)}}),
    "recomputed": ({"packs": 2}, {"lora": SMALL, "run": {"recompute": "full"}}),
    "narrow": ({"packs": 2}, {"lora": SMALL, "run": {"dtype": "bfloat16"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_a_sharded_model_have_the_bits_of_others(case):
    """Eager equals replicas that hold the whole model, graphs equal eager."""
    options, changes = CASES[case]
    kinds = [("none", False), ("parameters", False), ("parameters", True)]
    options, changes = {"alike": True, "steps": 5, **options}, {"model": WIDE, **changes}
    for plain, eager, graph in run_ranks(run_kinds, 2, kinds, options, changes, seconds=200.0):
        assert not differences(plain, eager)
        assert graph["replayed"] and not differences(eager, graph)


def held(mesh, lora):
    """Elements of frozen matrices of layers, of what is kept of them, and of their gradients; spans
    that are sharded; names in a checkpoint."""
    config = settings("parameters", model=WIDE, lora=lora)
    model = build_chunks(config, CPU, mesh)
    frozen = sum(
        p.numel()
        for name, p in model.named_parameters()
        if name.startswith("layers.") and p.ndim >= 2 and not p.requires_grad
    )
    flat = make_optimizer(model, config, mesh).flat
    kept = sum(span.kept_parameters.numel() for span in flat.frozen)
    sharded = [span for span in flat.spans if span.sharded_layer is not None]
    gradients = sum(span.gradients.numel() + span.own_gradients.numel() for span in flat.frozen)
    return frozen, kept, gradients, len(sharded), sorted(model.stored(flat.gathered()))


@pytest.mark.parametrize("lora", [SMALL, LARGE])
def test_frozen_weights_have_no_gradients_and_are_in_no_checkpoint(lora):
    for frozen, kept, gradients, sharded, stored in run_ranks(held, 2, lora):
        assert frozen / 2 <= kept <= frozen / 2 + 3 * 128 and not gradients
        assert sharded == (3 if lora is LARGE else 0)
        assert stored and all("lora_" in name for name in stored)


def sent(mesh):
    """Elements of what layers send in a step of one microbatch."""
    found = {"all_gather_flat": 0, "reduce_scatter_flat": 0}

    def noting(name):
        send = getattr(sharded_layers, name)

        def noted(*tensors, **options):
            found[name] += max(tensor.numel() for tensor in tensors)
            return send(*tensors, **options)

        return mock.patch.object(sharded_layers, name, noted)

    with noting("all_gather_flat"), noting("reduce_scatter_flat"):
        train(mesh, settings("parameters", model=WIDE, lora=SMALL), packs=2, steps=1)
    return found, held(mesh, SMALL)[1]


def test_frozen_weights_are_gathered_twice_and_never_reduced():
    for found, kept in run_ranks(sent, 2):
        # The last layer of the forward is there when the backward begins, but another may be next.
        assert found == {"all_gather_flat": 2 * 2 * kept, "reduce_scatter_flat": 0}


WITHOUT = {
    "a gather that is waited for": (ShardedLayer, "wait_for", lambda self, gathers: None),
    "gathers": (ShardedLayer, "gather", lambda self: []),
}


def run_broken(mesh, granularity):
    eager = settings("parameters", model=dict(WIDE), lora=dict(SMALL))
    changes = {"graph_options": {"granularity": granularity}}
    graph = settings("parameters", graph=True, model=dict(WIDE), lora=dict(SMALL), **changes)
    return broken(mesh, eager, graph, WITHOUT, packs=2, steps=4)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_late_gathers_of_frozen_weights_are_waited_for(granularity):
    for found in run_ranks(run_broken, 2, granularity, seconds=200.0):
        assert not found.pop("")
        assert len(found) == len(WITHOUT) and all(found.values()), found
