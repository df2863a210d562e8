"""Starts that share a store, as those of torchrun do: none reads what an earlier one wrote."""

import datetime
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from packgraph.parallel.ranks import Launch, met

pytestmark = pytest.mark.dist
RANKS = """
import os, sys, time
from datetime import timedelta
from packgraph.parallel.heartbeat import LostRankError, signs_of_life
from packgraph.parallel.mesh import Layout
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
