"""A rank that dies, stops or fails alone: the others end soon with one line that names it (long:
`make faults`)."""

import os
import socket
import subprocess
import sys

import faultkit
import pytest

from packgraph.parallel.heartbeat import INTERVAL, LOST, Silence, is_broken_connection
from packgraph.train.config.sections import RunConfig


def ended_well(found: faultkit.Outcome, *words: str) -> None:
    """The other rank has ended in time with one line that has these words, and no traceback."""
    assert found.seconds is not None and found.seconds < 15.0, found
    (line,) = found.errors()[0]
    assert all(word in line for word in ("rank 1", *words)), line


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "fault", "phase", "words"),
    [
        pytest.param(
            "dp",
            "kill",
            "save",
            # The save of step 4 is beside training, which is further by then.
            ["no sign of life", "step-00000002: go on with --resume"],
            marks=pytest.mark.core,
        ),
        (
            "dp",
            "raise",
            "boot",
            ["failed in phase boot: OSError: injected fault. There is no checkpoint yet"],
        ),
        (
            "dp",
            "raise",
            "data",
            ["failed in phase replay (step 4): DataError: corpus.jsonl:7", "step-00000002"],
        ),
        pytest.param(
            "tp",
            "raise",
            "capture",
            ["failed in phase capture (step 3)", "--graph.enabled false"],
            marks=pytest.mark.core,
        ),
        ("pp", "kill", "replay", ["no sign of life", "replay"]),
        ("cp", "raise", "replay", ["failed in phase replay (step 4): OSError"]),
        ("ep", "stop", "warm-up", ["no sign of life for 10 s", "warm-up"]),
    ],
    ids=str,
)
def test_the_others_end_with_one_line(tmp_path, layout, fault, phase, words):
    found = faultkit.run_with_fault(tmp_path, layout, fault, phase)
    ended_well(found, *words)
    assert found.codes[0] == LOST


@pytest.mark.slow
@pytest.mark.dist
def test_who_loses_rank_0_and_its_store_says_one_line(tmp_path):
    found = faultkit.run_with_fault(tmp_path, "dp", "kill", "replay", culprit=0)
    assert found.seconds is not None and found.codes[1] == LOST
    (line,) = found.errors()[1]
    assert "rank 0" in line and "frame #" not in found.said[1]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.core
def test_torchrun_ends_ranks_after_they_have_said_why(tmp_path):
    ended_well(
        faultkit.run_with_fault(tmp_path, "dp", "kill", "replay", torchrun=True),
        "no sign of life",
        "replay",
    )


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_is_stopped_for_a_short_time_goes_on(tmp_path):
    found = faultkit.run_with_fault(tmp_path, "dp", "stop", "replay", wake=5.0)
    assert found.codes == {0: 0, 1: 0} and found.errors() == {0: [], 1: []}


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_comes_back_too_late_ends_as_well(tmp_path):
    found = faultkit.run_with_fault(tmp_path, "dp", "stop", "replay", wake=20.0)
    ended_well(faultkit.Outcome(0.0, found.codes, found.said), "no sign of life")
    assert found.codes[0] == LOST and found.codes[1] in (LOST, 1) and len(found.errors()[1]) == 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("fault", ["kill", "stop", "raise"])
def test_rank_0_keeps_the_store_and_is_missed_too(tmp_path, fault):
    found = faultkit.run_with_fault(tmp_path, "dp", fault, "replay", culprit=0)
    assert found.seconds is not None and found.seconds < 15.0 and found.codes[1] == LOST
    (line,) = found.errors()[1]
    assert "rank 0" in line and "step-00000002" in line


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_goes_on_bitwise_after_a_rank_was_killed(tmp_path):
    """Losses of a run whose rank 1 is killed and that is started again are those of one that never
    was."""
    losses = []
    for name, phase in (("whole", "never"), ("parts", "replay")):
        (tmp_path / name).mkdir()
        faultkit.run_with_fault(tmp_path / name, "dp", "kill", phase)
        if name == "parts":
            again = faultkit.run_with_fault(
                tmp_path / name, "dp", "kill", "never", more=["--resume"]
            )
            assert again.codes == {0: 0, 1: 0}, again.said
        losses.append(faultkit.losses(tmp_path / name))
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_silence_counts_only_while_this_process_runs():
    silence = Silence(0.0)
    silence.heard("first", 0.0)
    for tick in range(1, 21):
        silence.tick(tick * 0.2)
    assert silence.seconds(4.0) == 4.0
    silence.tick(64.0)  # this process was stopped for a minute
    assert silence.seconds(64.0) == 4.0
    silence.heard("first", 65.0)
    assert silence.seconds(65.0) == 5.0, "an old beat is no sign of life"
    silence.heard("second", 65.0)
    assert silence.seconds(65.0) == 0.0 and INTERVAL < 1


STUCK = """
import time
import torch.distributed as dist
from packgraph.parallel.heartbeat import Heartbeat
from packgraph.parallel.ranks import Launch
store = dist.TCPStore("127.0.0.1", 0, 1, True)
with Heartbeat(store, Launch(), 5.0) as whereabouts:
    whereabouts.limit = 1.0
    whereabouts.at("start")
    time.sleep(2.0)  # no step
    for step in range(4):
        whereabouts.at("replay", step)
        time.sleep(0.5)
    print("good", flush=True)
    time.sleep(60)
"""


def test_a_step_that_waits_in_kernels_for_ever_is_ended():
    environment = os.environ | {"PYTHONPATH": str(faultkit.SOURCE)}
    found = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=50, env=environment
    )
    assert (found.returncode, found.stdout) == (LOST, "good\n")
    assert (
        "rank 0" in found.stderr
        and "in phase replay (step 3) for 1 s, though all ranks live" in found.stderr
    )


def test_what_counts_as_a_broken_connection():
    lost = RuntimeError(
        "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1767"
    )
    wrapped = OSError("torch could not write")
    wrapped.__cause__ = lost
    assert is_broken_connection(wrapped) and is_broken_connection(lost)
    assert not is_broken_connection(OSError(28, "No space left on device"))
    assert not is_broken_connection(RuntimeError("shapes do not fit")) and not is_broken_connection(
        None
    )


def test_a_timeout_that_beats_would_miss_is_refused():
    with pytest.raises(ValueError, match="timeout must be at least 5 seconds"):
        RunConfig(timeout=1.0)


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_starts_ranks_again_until_the_run_is_done():
    """It keeps its store: what the ranks of before have said there must not end those of now."""
    script = os.path.join(os.path.dirname(__file__), "restarts.py")
    done = subprocess.run(
        [sys.executable, script, "--ranks", "2", "--restarts", "2"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed 2 times" in done.stdout
    assert "bitwise equal" in done.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_a_port_that_another_process_took_is_no_outcome(tmp_path, monkeypatch):
    """Also the control: with no other port, the run does not come to its fault."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], faultkit.free_port()]
        monkeypatch.setattr(faultkit, "free_port", lambda: ports.pop(0))
        found = faultkit.run_with_fault(tmp_path, "dp", "raise", "boot")
    assert not ports and found.seconds is not None, found
