"""Sharded layers whose ranks read each other's memory: the numbers of collectives, and every
barrier is needed."""

import contextlib
import dataclasses
import functools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distkit import CPU, run_ranks
from peerkit import FilePeers, peers_on_cpus
from shardedkit import settings, train
from torch import nn
from tracekit import differences

import packgraph
from packgraph.graphs.stages import Stage, run_stages
from packgraph.parallel.layout import Layout
from packgraph.parallel.peer_copies import PeerParts
from packgraph.parallel.sharded_layers import ShardedLayers
from packgraph.verification.matrix import budget_over, config_for, random_packs
from packgraph.verification.ranks import verify_ranks


def run_ways(mesh, ways, changes, options):
    """Traces of training: each way says shard, whether in graphs, and whether by peers."""
    found = []
    for shard, graph, by_peers in ways:
        config = settings(shard, graph=graph, **{k: dict(v) for k, v in changes.items()})
        around = peers_on_cpus() if by_peers else contextlib.nullcontext([])
        with around as made:
            found.append(train(mesh, config, **options))
        assert bool(made) == by_peers
    return found


@pytest.mark.parametrize(
    ("shard", "granularity"),
    [
        ("gradients", "layer"),
        ("gradients", "chunk"),
        ("parameters", "layer"),
        pytest.param("parameters", "chunk", marks=pytest.mark.core),
    ],
)
def test_two_ranks_have_the_bits_of_collectives(shard, granularity):
    ways = [(shard, False, False), (shard, False, True), (shard, True, True)]
    changes = {"graph_options": {"granularity": granularity, "strict": True}}
    options = {"packs": 3, "uneven": True, "steps": 4}
    for collectives, peers, graph in run_ranks(run_ways, 2, ways, changes, options):
        assert not differences(collectives, peers)
        assert graph["replayed"] >= 3 and not differences(peers, graph)


CASES = {
    "untied ends": {"model": {"tie_embeddings": False}},
    "narrow": {"run": {"dtype": "bfloat16"}},
    "recomputed": {"run": {"recompute": "full"}},
    "state on the host": {"optimizer": {"offload": True}},
    "adapters": {"lora": {"rank": 2}},
}


@pytest.mark.parametrize("case", CASES)
def test_combinations_have_the_bits_of_collectives(case):
    ways = [("parameters", False, False), ("parameters", True, True)]
    for collectives, graph in run_ranks(run_ways, 2, ways, CASES[case], {"packs": 2, "steps": 5}):
        assert graph["replayed"] and not differences(collectives, graph)


def test_four_ranks_are_those_of_collectives_within_rounding_and_graphs_have_the_bits_of_eager():
    """Ranks add in another order than gloo does."""
    ways = [("parameters", False, False), ("parameters", False, True), ("parameters", True, True)]
    for collectives, eager, graph in run_ranks(run_ways, 4, ways, {}, {"packs": 5}, seconds=200.0):
        assert graph["replayed"] and not differences(eager, graph)
        for ours, theirs in zip(eager["trace"], collectives["trace"], strict=True):
            torch.testing.assert_close(ours["norm"], theirs["norm"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-4, atol=1e-6)


def reduced(mesh):
    """This rank's part of the sum of gradients that count ranks, and its parts where two are
    left."""
    peers = FilePeers(dist.group.WORLD)
    gradients = peers.allocate(8 * mesh.world, torch.float32).fill_(10.0**mesh.rank)
    found = PeerParts(peers, torch.empty(0), None, gradients).reduce()
    found.work.wait()
    return sum(found.parts), [float(part[0]) for part in found.parts]


def test_sums_are_made_from_this_rank_on_in_the_memory_of_two_parts():
    for rank, (total, parts) in enumerate(run_ranks(reduced, 4)):
        assert torch.equal(total, torch.full((8,), 1111.0))
        assert parts[1] == 10.0 ** ((rank + 3) % 4)  # the farthest comes last


def test_a_chain_has_barriers_though_its_ends_have_nothing_that_is_copied():
    """Such as layers of experts alone, whose replicas are another group."""
    span = lambda layer, peers: SimpleNamespace(  # noqa: E731
        sharded_layer=layer, is_gathered=True, is_frozen=False, peers=peers, members=[], behind=()
    )
    copied = SimpleNamespace(peers=object())
    flat = SimpleNamespace(spans=[span(0, None), span(1, copied), span(2, None)], frozen=[])
    assert [layer.peers for layer in ShardedLayers(flat).layers.values()] == [copied.peers] * 3


def test_blocks_of_two_read_each_other():
    ways = [("parameters", False, False), ("parameters", True, True)]
    changes = {"parallel": {"shard_ranks": 2}}
    for collectives, graph in run_ranks(run_ways, 4, ways, changes, {"packs": 5}, seconds=200.0):
        assert graph["replayed"] and not differences(collectives, graph)


def verified(mesh, layout, granularity):
    """Every rank of a layout of several kinds of parallelism, against one process."""
    config = config_for(layout, granularity, 4)
    parallel = dataclasses.replace(config.parallel, shard="parameters")
    config = dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, strict=True), parallel=parallel
    )
    packs = functools.partial(random_packs, seed=1)
    with peers_on_cpus() as made:
        report = verify_ranks(
            "peers", config, packs, CPU, mesh, apart=False, budget=budget_over(layout.dp)
        )
    assert made
    return report


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, pp=2),
        Layout(dp=2, tp=2),
        Layout(dp=2, cp=2),
        pytest.param(Layout(dp=4, ep=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_agree_with_one_process_and_graphs_with_eager(layout):
    reports = run_ranks(verified, 4, layout, "chunk", layout=layout, seconds=300.0)
    for report in reports:
        assert report.good and report.one_process.good and not report.silent_ranks(), report


def run_without(mesh, missing):
    """Eager training where one barrier is missing, and a rank is late, against a right one: one
    computes gradients late, or copies them late."""
    late = {1: "taken"} if missing == "complete" else {0: "complete"}
    config, options = settings("parameters"), {"packs": 2, "steps": 3}
    expected = train(mesh, config, **options)
    with peers_on_cpus(without=missing, late=late):
        return differences(expected, train(mesh, config, **options))


@pytest.mark.parametrize("missing", ["", "complete", "taken"])
def test_every_barrier_of_a_reduction_is_needed(missing):
    found = run_ranks(run_without, 2, missing)
    assert any(found) == bool(missing), found


class Matrices(nn.Module):
    """Layers of a matrix each, and nothing that is whole: no collective of another kind makes ranks
    wait."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def stages(self):
        return [
            Stage("matrix", number, functools.partial(self._run, layer))
            for number, layer in enumerate(self.layers)
        ]

    def begin(self, x):
        return {"x": x}

    def end(self, state):
        return state["x"].square().sum()

    def _run(self, layer, state):
        return {**state, "x": layer(state["x"]).tanh()}

    def forward(self, x):
        return run_stages(self, x)


def run_late(mesh, missing):
    """Losses of steps in which a rank updates, or reads, later than the other; and of a forward
    after weights were loaded."""
    torch.manual_seed(0)
    model, losses = Matrices(), []
    with peers_on_cpus(without=missing):
        shards = packgraph.shard(model)
    optimizer = torch.optim.SGD(shards.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    for _ in range(3):
        loss = model(x)
        losses.append(loss.item())
        loss.backward()
        if mesh.rank == 1:
            update = optimizer.step
            optimizer.step = lambda update=update: (time.sleep(0.05), update())
        shards.step(optimizer)
    for late in (0, 1):
        if mesh.rank == late:
            time.sleep(0.05)
        with torch.no_grad():
            for part in shards.parameters():
                part.add_(1.0)
            losses.append(model(x).item())
    return losses


def test_barriers_around_parameters_are_needed():
    (right, same), (early, late) = (run_ranks(run_late, 2, missing) for missing in ("", "main"))
    assert right == same and (early != right or late != right)
