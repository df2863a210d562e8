"""A capture that fails on one rank alone: all run eagerly then, or all end with one message; nobody
waits for ever."""

import dataclasses
import time
import warnings
from unittest import mock

import pytest
import torch
from distkit import CPU, RankFailed, run_ranks
from trainkit import RandomPacks, tiny

from packgraph.graphs import capture as capture_module
from packgraph.graphs import step as step_module
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.parallel.mesh import Layout
from packgraph.parallel.ranks import (
    LostPartnersError,
    StoreConsensus,
    replica_consensus,
    stage_consensus,
)
from packgraph.train import memory as memory_budget
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.feed import take_step
from packgraph.verification.compared_run import ComparedRun

pytestmark = pytest.mark.dist

CP2, CP2_PP2, CP2_TP2 = Layout(dp=1, cp=2), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)
FAILED = CaptureError("out of room", "model.py:1 in forward", "give it some")


def config(layout, granularity):
    made = tiny(graph=True)
    shape = dataclasses.replace(made.model, num_heads=4, num_kv_heads=2, tie_embeddings=False)
    return dataclasses.replace(
        made,
        model=shape,
        graph=dataclasses.replace(made.graph, granularity=granularity),
        parallel=ParallelConfig(dp=1, pp=layout.pp, cp=layout.cp, tp=layout.tp),
    )


def voting(mesh):
    """The verdicts of a few votes."""
    if mesh.rank < 2:  # a circle of some, whose votes say nothing to all
        assert StoreConsensus("test", range(2), patience=1.0)("something else", None) is None
    vote = StoreConsensus("test", range(mesh.world), patience=1.0)
    told = [vote("the first", None), vote("the second", FAILED if mesh.rank == 1 else None)]
    again = StoreConsensus("test", range(mesh.world), patience=1.0)
    told.append(again("the first of others", None))
    late = None
    if mesh.rank < 2:  # rank 2 never comes, as if it waited for one of these
        try:
            again("the third", FAILED if mesh.rank == 1 else None)
        except LostPartnersError as error:
            late = str(error)
    return [None if error is None else str(error) for error in told], late


def test_a_failure_of_one_is_one_of_all_and_nobody_waits_for_ever():
    found = run_ranks(voting, 3, layout=Layout(dp=1, cp=3))
    for rank, ((first, second, third), late) in enumerate(found):
        assert first is None and third is None
        assert ("on rank 1" in second) == (rank != 1) and "out of room" in second
        if rank < 2:
            assert (
                "the third could not be captured on rank 1" in late
                and "rank 2 did not come" in late
            )
            assert "model.py:1 in forward" in late


def circles(mesh):
    return [
        vote._ranks if isinstance(vote, StoreConsensus) else []
        for vote in (stage_consensus(mesh), replica_consensus(mesh))
    ]


@pytest.mark.parametrize(
    ("layout", "stage", "replica"),
    [
        (Layout(dp=2), [], []),
        (Layout(dp=1, cp=2), [0, 1], [0, 1]),
        (Layout(dp=2, ep=2), [0, 1], [0, 1]),
        (Layout(dp=1, pp=2), [], [0, 1]),
    ],
    ids=str,
)
def test_those_who_exchange_data_vote_together(layout, stage, replica):
    assert run_ranks(circles, 2, layout=layout)[0] == [stage, replica]


def failing(what, when, culprit, rank):
    """Break `what` of a module on one rank: before it begins, or after it is done."""
    owner, name = what
    original, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(None)
        if when == "before" and len(calls) == 1:
            raise FAILED
        made = original(*args, **kwargs)
        if len(calls) == 1:
            raise FAILED
        return made

    return mock.patch.object(owner, name, broken if rank == culprit else original)


def trained(mesh, settings, what, when, patience):
    """Losses and gradients of some steps, by eager training and by graphs of which one fails on the
    last rank."""
    packs, sides = (
        RandomPacks(),
        [
            ComparedRun(
                dataclasses.replace(
                    settings, graph=dataclasses.replace(settings.graph, enabled=enabled)
                ),
                CPU,
                mesh,
            )
            for enabled in (False, True)
        ],
    )
    sides[1].executor.agree_by(stage_consensus(mesh, patience), replica_consensus(mesh, patience))
    trace = ([], [])
    with (
        failing(what, when, mesh.world - 1, mesh.rank),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always", PackgraphWarning)
        for number in range(4):
            batches = take_step(packs, 90)
            for side, found in zip(sides, trace, strict=True):
                found.append(side.gradients_of(number, batches, False))
                found += [value.clone() for value in side.optimizer.gradients().values()]
                side.optimizer.step(1e-3)
    totals = sides[1].executor.totals()
    for side in sides:
        side.close()
    return (
        trace,
        totals,
        [str(one.message) for one in caught if issubclass(one.category, PackgraphWarning)],
    )


CAPTURE, STEP = (capture_module, "capture_variant"), (step_module.GraphedStep, "_capture")
TRACE = (memory_budget, "trial_memory")


@pytest.mark.parametrize(
    ("layout", "what", "granularity"),
    [
        (CP2, CAPTURE, "chunk"),
        (CP2, TRACE, "chunk"),
        pytest.param(CP2, STEP, "step", marks=pytest.mark.slow),
        pytest.param(CP2_TP2, CAPTURE, "chunk", marks=pytest.mark.slow),
        pytest.param(CP2_PP2, CAPTURE, "layer", marks=pytest.mark.slow),
        pytest.param(CP2_PP2, STEP, "step", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_fails_on_one_rank_runs_eagerly_on_all(layout, what, granularity):
    """The last rank fails after its exchanges, for want of memory say: bitwise eager training goes
    on everywhere."""
    settings = config(layout, granularity)
    world = layout.cp * layout.pp * layout.tp
    found = run_ranks(trained, world, settings, what, "after", 30.0, layout=layout, seconds=120.0)
    for rank, ((expected, graphs), totals, told) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(expected, graphs, strict=True))
        assert (totals["replayed"] > 0) == (layout != CP2_PP2 or what == STEP), (
            "a pipeline has all its graphs or none"
        )
        assert totals["fallbacks"].keys() == found[0][1]["fallbacks"].keys()
        if what != TRACE:
            assert any("capture failed" in reason for reason in totals["fallbacks"]), totals
            # another stage is told the reason alone
            hears = rank >= 2 or layout != CP2_PP2 or what == STEP
            assert any("out of room" in text for text in told) == hears
            assert any(f"on rank {world - 1}, which shares" in text for text in told) == (
                hears and rank != world - 1
            )


def test_partners_that_wait_for_the_rank_that_failed_end_the_run():
    """Before its exchanges: the other one waits in them and cannot be told. The message says so,
    soon."""
    began = time.monotonic()
    with pytest.raises(
        RankFailed,
        match=r"rank 1, and rank 0 did not come to vote on it within 2 s(.|\n)*out of room",
    ):
        run_ranks(trained, 2, config(CP2, "chunk"), CAPTURE, "before", 2.0, layout=CP2)
    assert time.monotonic() - began < 25.0
