"""A parameter that two stages hold is one: same gradient, same update, counted once."""

import pytest
import torch
from distkit import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from packgraph.parallel.layout import Layout
from packgraph.parallel.pipeline.links import shared_names
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer

NAMES = st.lists(st.sampled_from("abcd"), unique=True)


@given(st.lists(NAMES, min_size=4, max_size=4), st.permutations(range(4)), st.integers(1, 4))
def test_shared_names_are_those_of_several_ranks(names, order, size):
    pipeline = order[:size]
    found = shared_names(names, pipeline)
    assert list(found) == sorted(found)
    for name in "abcd":
        holders = [rank for rank in pipeline if name in names[rank]]
        assert list(found.get(name, ())) == (holders if len(holders) > 1 else [])


def two_steps(mesh, tied):
    """Stages with a matrix of their own and a tied one; replicas with gradients of their own."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(5, 7))
    own = nn.Parameter(torch.randn(3, mesh.place["pp"] + 1))
    named = [("table", table), (f"own {mesh.place['pp']}", own)]
    # The order of registration may differ between the stages.
    named = named[::-1] if mesh.place["pp"] else named
    optimizer = Optimizer(named, OptimizerConfig(clip_norm=0.5), mesh)
    if not tied:  # what happens when nobody knows
        for span in optimizer.flat.spans:
            span.tied = None
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        table.grad += 0.1 * (1 + mesh.rank + step)
        own.grad += 0.1 * (1 + mesh.place["dp"])
        norms.append(optimizer.step(0.01).item())
    return table.detach().clone(), norms


@pytest.mark.parametrize("dp", [1, 2])
def test_copies_get_the_same_update_and_count_once(dp):
    results = run_ranks(two_steps, 2 * dp, True, layout=Layout(dp=dp, pp=2))
    tables = [table for table, _ in results]
    assert all(torch.equal(tables[0], table) for table in tables)
    for step in range(2):
        tied = sum(0.1 * (1 + rank + step) for rank in range(2 * dp))
        own = sum(0.1 * (1 + replica) for replica in range(dp))
        expected = (35 * tied**2 + (3 + 6) * own**2) ** 0.5
        assert all(norms[step] == pytest.approx(expected, rel=1e-5) for _, norms in results)


def test_a_copy_that_counts_twice_is_seen():
    """Negative control of the norm."""
    (_, right), _ = run_ranks(two_steps, 2, True, layout=Layout(dp=1, pp=2))
    (_, wrong), _ = run_ranks(two_steps, 2, False, layout=Layout(dp=1, pp=2))
    assert wrong[0] > 1.2 * right[0]
