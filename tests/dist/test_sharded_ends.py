"""Embedding and head that ranks share as they share layers."""

from unittest import mock

import pytest
from distkit import CPU, run_ranks
from shardedkit import settings, train
from tracekit import differences

from packgraph.parallel.sharded_layers import ShardedLayer
from packgraph.train.build import build_chunks, make_optimizer

ENDS = {"embed_tokens.weight", "lm_head.weight"}


def config_of(shard, *, graph=False, model=None, **changes):
    kind = {"tie_embeddings": False, **(model or {})}
    return settings(shard, graph=graph, model=kind, **{k: dict(v) for k, v in changes.items()})


def runs(mesh, shard, options, changes):
    """Replicas, sharded and eager, sharded and in graphs."""
    kinds = [("none", False), (shard, False), (shard, True)]
    return [train(mesh, config_of(s, graph=graph, **changes), **options) for s, graph in kinds]


CASES = {
    "layers": ({}, {"graph_options": {"granularity": "layer", "strict": True}}),
    "chunk": ({}, {"graph_options": {"granularity": "chunk", "strict": True}}),
    "frozen embedding": ({"freeze": "embed_tokens"}, {}),
    "frozen head": ({"freeze": "lm_head"}, {}),
    "scope": ({}, {"graph_options": {"scope": ("head",)}}),
    "narrow": ({}, {"run": {"dtype": "bfloat16"}, "model": {"num_layers": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_have_the_bits_of_whole_ends(case):
    options, changes = CASES[case]
    options = {"packs": 2, "alike": True, "steps": 5, **options}
    for plain, eager, graph in run_ranks(runs, 2, "parameters", options, changes, seconds=200.0):
        assert not differences(plain, eager)
        assert graph["replayed"] >= 2 and not differences(eager, graph)


def exchanged(mesh):
    """Graphs that exchange as late as they may, as they are, and without waits for the ends."""
    options = {"packs": 2, "steps": 4}
    eager = train(mesh, config_of("parameters"), **options)
    found = [
        differences(eager, train(mesh, config_of("parameters", graph=True), late=True, **options))
    ]
    wait, add = ShardedLayer.wait_for, ShardedLayer.add

    def impatient(self, gathers):
        if self.number not in (-1, 2):  # the first gather, and that of the head
            wait(self, gathers)

    def early(self, reductions):
        for each in reductions if self.number == 2 else ():  # of the head
            each.add()
        if self.number != 2:
            add(self, reductions)

    for name, instead in (("wait_for", impatient), ("add", early)):
        with mock.patch.object(ShardedLayer, name, instead):
            graph = train(mesh, config_of("parameters", graph=True), late=True, **options)
            found.append(differences(eager, graph))
    return found


def test_exchanges_of_ends_are_waited_for():
    for right, *wrong in run_ranks(exchanged, 2, seconds=200.0):
        assert not right and all(wrong)


def kept(mesh, model):
    config = config_of("parameters", model=model)
    chunks = build_chunks(config, CPU, mesh)
    optimizer = make_optimizer(chunks, config, mesh)
    if not model:
        with pytest.raises(RuntimeError, match="head is sharded"):
            chunks.chunks[0].logits(None)
    return ENDS & optimizer.flat.gathered().keys()


@pytest.mark.parametrize(
    ("model", "names"), [({}, ENDS), ({"tie_embeddings": True}, set()), ({"mtp_layers": 1}, set())]
)
def test_what_one_stage_alone_reads_is_shared(model, names):
    assert run_ranks(kept, 2, model) == [names, names]
