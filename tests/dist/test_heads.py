"""Heads that are normalised and rotated by one operation on several ranks: where weights are split
layers stay plain, elsewhere graphs have the bits of eager."""

from unittest import mock

import pytest
from distkit import run_ranks
from parallelkit import train_both
from tracekit import differences

from packgraph.ops import heads
from packgraph.parallel.mesh import Layout


def train_fused(mesh, options):
    """Training eagerly and through graphs, and whether the operation ran."""
    seen, own = [], heads.naive_turn
    replaced = {
        "is_measured": lambda device: True,
        "LEAST_ROWS": 0,
        "naive_turn": lambda *operands: seen.append(1) or own(*operands),
    }
    with mock.patch.multiple(heads, **replaced):
        return *train_both(mesh, options), bool(seen)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        (Layout(tp=2), {"sequence": False}, False),
        (Layout(tp=2), {"sequence": True}, False),
        (Layout(cp=2), {}, True),
        (Layout(dp=2), {}, True),
    ],
    ids=str,
)
def test_graphs_have_the_bits_of_eager(layout, options, expected):
    options = {"steps": 6, "granularity": "chunk", **options}
    for eager, captured, ran in run_ranks(train_fused, 2, options, layout=layout):
        assert ran == expected and captured["replayed"] >= 3
        assert not differences(eager, captured)
