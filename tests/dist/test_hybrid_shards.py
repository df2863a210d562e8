"""Layers that some of the replicas share, such as those of a host: two pairs of four processes."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distkit import CPU, run_ranks
from shardedkit import broken, settings, train
from tracekit import differences
from trainkit import RandomPacks

from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import stage_consensus
from packgraph.parallel.sharded_layers import ShardedLayer
from packgraph.train.build import build_chunks, make_optimizer
from packgraph.train.feed import MicrobatchAssignment

PAIRS = {"shard_ranks": 2}


def run_kinds(mesh, kinds, options, changes):
    """kinds: (shard, ranks that share layers, graph)."""
    return [
        train(
            mesh,
            settings(
                shard,
                graph=graph,
                parallel={"shard_ranks": ranks},
                **{k: dict(v) for k, v in changes.items()},
            ),
            **options,
        )
        for shard, ranks, graph in kinds
    ]


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_graphs_equal_eager_bitwise_and_replicas_within_rounding(shard):
    """Sums of four gradients are added pair by pair."""
    kinds = [("none", 0, False), (shard, 2, False), (shard, 2, True)]
    options = {"packs": 5, "uneven": True, "alike": True}
    for plain, eager, graph in run_ranks(run_kinds, 4, kinds, options, {}, seconds=200.0):
        assert graph["replayed"] >= 3 and not differences(eager, graph)
        for ours, theirs in zip(eager["trace"], plain["trace"], strict=True):
            torch.testing.assert_close(ours["norm"], theirs["norm"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"run": {"dtype": "bfloat16"}}], ids=["float32", "narrow"])
def test_where_two_of_four_have_tokens_all_layouts_have_the_same_bits(changes):
    """Sums of two numbers and zeros have one order. The norm has four numbers, so none is clipped,
    and it is the same but for rounding."""
    kinds = [("none", 0, False), ("parameters", 0, False), ("gradients", 2, False)]
    kinds += [("parameters", 2, False), ("parameters", 2, True)]
    options = {"packs": 2, "alike": True}
    changes = {"optimizer": {"clip_norm": None}, **changes}
    for runs in run_ranks(run_kinds, 4, kinds, options, changes, seconds=200.0):
        plain, *others = runs
        assert others[-1]["replayed"]
        for other in others:
            found = differences(plain, other)
            assert not [text for text in found if not text.endswith(": norm")], found
            for ours, theirs in zip(other["trace"], plain["trace"], strict=True):
                torch.testing.assert_close(ours["norm"], theirs["norm"], rtol=1e-5, atol=0)


def early(mesh, granularity):
    """Spans of layers whose sums over pairs have begun before each step's backward ended."""
    found, reduce = [], FlatParameters.reduce

    def noting(self):
        sent = self.spans[: self.launched]
        found.append([span.sharded_layer for span in sent if span.sharded_layer is not None])
        reduce(self)

    changes = {"model": {"num_layers": 5}, "graph_options": {"granularity": granularity}}
    with mock.patch.object(FlatParameters, "reduce", noting):
        train(mesh, settings("parameters", graph=True, parallel=PAIRS, **changes), packs=4)
    return found


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_sums_over_pairs_begin_before_the_last_backward_ends(granularity):
    """Those of a layer when the second one in front of it is done, eagerly and in graphs."""
    for found in run_ranks(early, 4, granularity):
        assert found == [[4, 3, 2]] * len(found)


def held(mesh, shard):
    """Elements of a layer's matrices, and those of them that this rank keeps and updates."""
    config = settings(shard, parallel=PAIRS)
    model = build_chunks(config, CPU, mesh)
    layer = sum(p.numel() for p in model.chunks[0].layers["0"].parameters() if p.ndim >= 2)
    spans = make_optimizer(model, config, mesh).flat.spans
    (span,) = [span for span in spans if span.sharded_layer == 0]
    every = [None] * mesh.world
    dist.all_gather_object(every, (span.own.start, span.own.stop))
    return layer, span.kept_parameters.numel(), span.kept_gradients.numel(), span.own, every


def test_a_rank_keeps_half_of_a_layer_and_updates_a_quarter():
    results = run_ranks(held, 4, "parameters", layout=Layout(dp=4, **PAIRS))
    for layer, parameters, gradients, own, every in results:
        size = 4 * (own.stop - own.start)
        assert layer <= size < layer + 4 * 128 and parameters == gradients == size // 2
        assert [start * 4 // size for start, _ in every] == [0, 2, 1, 3]


def too_early(self, number):
    """Whether the gradients of a span are complete, not whether others have been added to them."""
    return not self._expected[number]


WITHOUT = {
    "sums over pairs": (FlatParameters, "_reduce_across", lambda self, span: None),
    "a sum that waits for the layer in front": (FlatParameters, "_is_complete", too_early),
    "new parameters of the other pair": (FlatParameters, "_gather_across", lambda self: []),
    "a gather that is waited for": (ShardedLayer, "wait_for", lambda self, gathers: None),
    "gathers": (ShardedLayer, "gather", lambda self: []),
}


def run_broken(mesh, granularity):
    eager = settings("parameters", parallel=PAIRS)
    changes = {"graph_options": {"granularity": granularity}}
    graph = settings("parameters", graph=True, parallel=PAIRS, **changes)
    return broken(mesh, eager, graph, WITHOUT, packs=4, steps=4)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_late_exchanges_are_waited_for_and_what_is_left_out_is_found(granularity):
    for found in run_ranks(run_broken, 4, granularity, seconds=250.0):
        assert not found.pop("")
        assert len(found) == len(WITHOUT) and all(found.values()), found


def together(mesh):
    votes = stage_consensus(mesh, sharded=True)
    sharing = MicrobatchAssignment.of(mesh, in_step=True)
    return votes._ranks, sharing.together, [len(s) for s in sharing.shares(list(steps_of(5)))]


def steps_of(count):
    return itertools.islice(RandomPacks(), count)


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [
        (Layout(dp=4, **PAIRS), [2, 3], 2),
        (Layout(dp=2, cp=2, **PAIRS), [2, 3], 1),
        (Layout(dp=4, ep=4, **PAIRS), [0, 1, 2, 3], 4),
        (Layout(dp=4), [0, 1, 2, 3], 4),
    ],
    ids=str,
)
def test_only_those_that_share_layers_are_in_step(layout, ranks, replicas):
    voters, team, counts = run_ranks(together, 4, layout=layout)[3]
    assert (voters, team) == (ranks, replicas)
    teams = [set(counts[at : at + team]) for at in range(0, len(counts), team)]
    assert all(len(each) == 1 for each in teams), counts


CASES = {
    "adapters": {"lora": {"rank": 1}, "model": {"hidden_size": 32, "intermediate_size": 64}},
    "state on the host": {"optimizer": {"offload": True}},
    "recomputed": {"run": {"recompute": "full"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
}


@pytest.mark.parametrize("case", CASES)
def test_combinations(case):
    """Graphs equal eager."""
    if case == "adapters":
        pytest.importorskip("peft")
    kinds = [("parameters", 2, False), ("parameters", 2, True)]
    options = {"packs": 4, "steps": 4}
    for eager, graph in run_ranks(run_kinds, 4, kinds, options, CASES[case], seconds=200.0):
        assert graph["replayed"] and not differences(eager, graph)
