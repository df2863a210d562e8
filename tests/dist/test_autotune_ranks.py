"""Several ranks time their graphs, and all of them choose alike: the slowest decides."""

import contextlib
import dataclasses
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from trainkit import CAPACITIES, tiny, trainer

from packgraph.graphs.graphed import Control
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.replay import ReplayHandle
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import on_first
from packgraph.train import autotune
from packgraph.train.autotune import FASTER, TIMED
from packgraph.train.config.reading import render
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.signals import StopRequest

NAMES = [render(capacity) for capacity in CAPACITIES]
STEPS = 36


def settings(layout: Layout, **graph):
    made = tiny(graph=True, steps=STEPS, checkpoint_every=1000, tokens_per_step=120)
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, num_kv_heads=2),
        graph=dataclasses.replace(made.graph, **graph),
        parallel=ParallelConfig(dp=layout.dp, pp=layout.pp, tp=layout.tp),
    )


@contextlib.contextmanager
def shared_folder(mesh):
    """A folder that all ranks share, gone when the first one leaves the block."""
    with tempfile.TemporaryDirectory() as own:
        folder = on_first(mesh, lambda: own)
        yield Path(folder)
        on_first(mesh, lambda: None)  # nobody is in the block any longer


def run_one(mesh, config, slow_replay, slow_eager):
    """Train on this rank, whose replays and eager calls take longer by these seconds."""
    acquire = Control.acquire

    def acquiring(self, args, kwargs):
        result = acquire(self, args, kwargs)
        time.sleep(slow_replay if isinstance(result, ReplayHandle) else slow_eager)
        return result

    with shared_folder(mesh) as folder, mock.patch.object(Control, "acquire", acquiring):
        run = trainer(folder / "run", config, mesh=mesh)
        summary = run.run(StopRequest())
        weights = {
            name: local_tensor(value).clone() for name, value in run.model.state_dict().items()
        }
        run.close()
    return summary, weights


def slow_on_rank_1(mesh, config):
    """Replays are faster than eager on rank 0 and slower than any eager call on rank 1."""
    return run_one(mesh, config, 0.15 if mesh.rank == 1 else 0.0, 0.06 if mesh.rank == 0 else 0.0)


def each_for_itself(mesh, config):
    with mock.patch.object(autotune, "gather_numbers", lambda group, numbers: [list(numbers)]):
        return slow_on_rank_1(mesh, config)


def fast_replays(mesh, config):
    return run_one(mesh, config, 0.0, 0.03)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=1, tp=2), Layout(dp=1, pp=2)], ids=str)
def test_all_ranks_choose_what_is_faster_for_the_slowest(layout):
    every = run_ranks(
        slow_on_rank_1, 2, settings(layout, autotune=True), layout=layout, seconds=240
    )
    expected = ["whole steps"] if layout.pp > 1 else NAMES
    for summary, _ in every:
        assert [(name, choice["way"]) for name, choice in summary["choices"].items()] == [
            (name, "eager") for name in expected
        ]
        assert summary["fallbacks"][FASTER] > 0 and summary["pool_bytes"] == 0
    assert every[0][0]["choices"] == every[1][0]["choices"], "all know the same figures"
    plain = run_ranks(
        slow_on_rank_1, 2, settings(layout, enabled=False), layout=layout, seconds=240
    )
    for (_, tuned), (_, eager) in zip(every, plain, strict=True):
        assert not [name for name in eager if not torch.equal(tuned[name], eager[name])]


def test_ranks_that_do_not_ask_each_other_choose_differently():
    """Negative control of R16."""
    first, second = run_ranks(
        each_for_itself, 2, settings(Layout(dp=2), autotune=True), layout=Layout(dp=2), seconds=240
    )
    # Not of every bucket: the last replay of a step may wait for gradients of the slow rank.
    assert "replay" in {choice["way"] for choice in first[0]["choices"].values()}
    assert {choice["way"] for choice in second[0]["choices"].values()} == {"eager"}


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=1, pp=2)], ids=str)
def test_ranks_keep_graphs_that_are_faster(layout):
    for summary, _ in run_ranks(
        fast_replays, 2, settings(layout, autotune=True), layout=layout, seconds=240
    ):
        assert {choice["way"] for choice in summary["choices"].values()} == {"replay"}
        assert all(choice["decided"] for choice in summary["choices"].values())
        assert FASTER not in summary["fallbacks"] and summary["fallbacks"][TIMED] > 0
