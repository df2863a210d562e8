"""A capture that fails on one rank alone: all run eagerly then, or all end with one message; nobody
waits for ever."""

import dataclasses
import datetime
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distkit import CPU, RankFailed, run_ranks
from trainkit import RandomPacks, tiny

from packgraph.graphs import capture as capture_module
from packgraph.graphs import step as step_module
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import (
    Launch,
    LostPartnersError,
    StoreConsensus,
    met,
    replica_consensus,
    stage_consensus,
)
from packgraph.train import memory as memory_budget
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.data.microbatches import take_step
from packgraph.verification.compared_run import ComparedRun

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


# ---- starts that share a store, as those of torchrun do: none reads what an earlier one wrote


RANKS = """
import os, sys, time
from datetime import timedelta
from packgraph.parallel.heartbeat import LostRankError, signs_of_life
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, from_all, processes
import torch
launch, how = Launch.read(), sys.argv[1]
torch.set_num_threads(1)
for start in range(2 if how == "twice" else 1):
    with signs_of_life(launch, 5.0) as whereabouts:
        with processes(Layout(), torch.device("cpu"), launch, store=whereabouts.store) as mesh:
            if how == "fails" and launch.rank == 1:
                raise ValueError("this start fails")
            if how == "goes on":
                time.sleep(3.0)  # a reason to end that is heard ends the process before that
            # In a second start rank 0 says it alone.
            together = (start == 0 or launch.rank == 0) and whereabouts.together("agreed")
            print(start, together, from_all(mesh, launch.rank + start), flush=True)
"""


def store(server: bool = False, port: int = 0) -> dist.TCPStore:
    wait = datetime.timedelta(seconds=20)
    return dist.TCPStore("127.0.0.1", port, is_master=server, timeout=wait, wait_for_workers=False)


def start(place: dist.TCPStore, how: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks that meet in a store which outlives them, at the same count of restarts."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, how],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=90) for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, *text)
        for rank, text in zip(ranks, said, strict=True)
    ]


def test_a_start_after_a_failed_one_hears_nothing_of_it(tmp_path):
    place = store(server=True)
    failed = start(place, "fails")
    assert all(rank.returncode for rank in failed) and "rank 1" in failed[0].stderr
    for rank in start(place, "goes on"):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.split("\n")[0] == "0 True [0, 1]"


def test_a_process_that_trains_twice_meets_twice():
    for rank in start(store(server=True), "twice"):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.splitlines() == ["0 True [0, 1]", "1 False [1, 2]"]


def test_ranks_find_the_start_of_their_own_among_those_that_were_killed():
    """What killed starts have left: names that nobody reads any more, and their prefixes."""
    place = store(server=True)
    found: dict[int, str] = {}
    for number in range(5):
        for rank in (1, 2, 3):
            place.set(f"packgraph/meeting/hello/{rank}", f"killed-{number}-{rank}")
            place.set(f"packgraph/meeting/welcome/killed-{number}-{rank}", "packgraph/killed")
        done = threading.Barrier(4)

        def come(rank: int, done: threading.Barrier = done, number: int = number) -> None:
            client = store(port=place.port)
            with met(client, Launch(rank, 4)) as own:
                own.set(f"said/{rank}", str(number))
                own.wait([f"said/{other}" for other in range(4)])
                found[rank] = "".join(own.get(f"said/{other}").decode() for other in range(4))
                done.wait(20)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == dict.fromkeys(range(4), str(number) * 4)
