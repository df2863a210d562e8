"""Exchanges inside the graph of a whole step: sharded layers gather and reduce in it, and spans are
reduced beside the last backward, as early as their gradients are complete and no earlier."""

from unittest import mock

import pytest
from distkit import run_ranks
from shardedkit import settings, train
from tracekit import differences

from packgraph.models.config import ExpertConfig
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.sharded_layers import ShardedLayer

WHOLE = {"granularity": "step", "optimizer": True, "strict": True}


def run_kinds(mesh, kinds, options, changes):
    """kinds: (shard, whether by graphs of whole steps)."""
    return [
        train(
            mesh,
            settings(
                shard,
                graph=graph,
                graph_options=WHOLE if graph else {},
                **{section: dict(values) for section, values in changes.items()},
            ),
            alike=True,
            late=graph,
            **options,
        )
        for shard, graph in kinds
    ]


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_steps_equal_eager_ones_bitwise(shard):
    """Of changing numbers of microbatches, some of them empty; exchanges run as late as they
    may."""
    kinds = [(shard, False), (shard, True)]
    options = {"packs": 3, "uneven": True, "steps": 9}
    for eager, graph in run_ranks(run_kinds, 2, kinds, options, {}):
        assert not differences(eager, graph)
        assert graph["replayed"] == 7 and set(graph["fallbacks"]) == {"warm-up"}


CASES = {
    "narrow": {"run": {"dtype": "bfloat16"}},
    "recomputed": {"run": {"recompute": "full"}},
    "spikes": {"run": {"on_spike": "skip"}},
    "eight bits": {"optimizer": {"name": "adamw8bit"}},
    "rows and columns": {"optimizer": {"name": "adafactor"}},
    "no clipping": {"optimizer": {"clip_norm": None}},
    "experts": {
        "model": {"experts": ExpertConfig(count=4, per_token=2, intermediate_size=24)},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_combinations(case):
    """Whole steps of sharded layers equal eager ones, and those of replicas that keep all."""
    kinds = [("none", True), ("parameters", False), ("parameters", True)]
    options = {"packs": 2, "steps": 6}
    for plain, eager, graph in run_ranks(run_kinds, 2, kinds, options, CASES[case]):
        assert graph["replayed"] == 4 and not differences(eager, graph)
        assert case == "experts" or not differences(plain, graph)


def add_at_once(self, reductions):
    for reduction in reductions:
        reduction.add()


def begin_early(self, parameters, settled=None, expect=FlatParameters.expect):
    """Whatever the backward still adds to."""
    expect(self, [], settled)
    self.ready([])


def reduce_without_waiting(self, reduce=FlatParameters.reduce):
    self._works = []
    reduce(self)


BROKEN = {
    "none": {
        "a reduction that begins when gradients are complete": (
            FlatParameters,
            "expect",
            begin_early,
        ),
        "a reduction that is waited for": (
            FlatParameters,
            "reduce",
            reduce_without_waiting,
        ),
    },
    "parameters": {
        "a gather that is waited for": (ShardedLayer, "wait_for", lambda self, gathers: None),
        "a reduction that is waited for": (ShardedLayer, "add", add_at_once),
        "gathers": (ShardedLayer, "gather", lambda self: []),
    },
}


def run_broken(mesh, shard):
    """Eager steps and graphs, right ones and some without what keeps their numbers right; and how
    many spans were under way when backwards of captures ended."""
    early = []

    def counted(self, reduce=FlatParameters.reduce):
        early.append((self.launched, len(self.spans)))
        reduce(self)

    options = {"packs": 3, "steps": 4, "alike": True}
    graph = settings(shard, graph=True, graph_options=WHOLE)
    eager = train(mesh, settings(shard), **options)
    with mock.patch.object(FlatParameters, "reduce", counted):
        found = {"": differences(eager, train(mesh, graph, late=True, **options))}
    for what, (owner, name, instead) in BROKEN[shard].items():
        with mock.patch.object(owner, name, instead):
            found[what] = differences(eager, train(mesh, graph, late=True, **options))
    return found, early


@pytest.mark.parametrize("shard", BROKEN)
def test_what_is_left_out_of_exchanges_is_found(shard):
    for found, early in run_ranks(run_broken, 2, shard, seconds=120.0):
        assert not found.pop("")
        assert len(found) == len(BROKEN[shard]) and all(found.values()), found
        launched = {count for count, _ in early}
        # Beside exchanges of layers, which must be in one order, spans wait for the end.
        assert launched == ({0, early[0][1]}), early
