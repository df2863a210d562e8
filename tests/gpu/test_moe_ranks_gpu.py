"""Dispatchers over NCCL and symmetric memory; each test starts ranks by torchrun and needs that
many GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packgraph.moe.peer_read import symmetric_problem

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


def start(ranks, *command):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "PYTHONPATH": f"{tests.parent / 'src'}{os.pathsep}{tests / 'helpers'}",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [*torchrun, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["--tokens 1024", "--tokens 256 --places 1"])
def test_dispatchers_and_replays_have_the_same_bits(ranks, options):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    problem = symmetric_problem(torch.device("cuda"), ranks)
    script = str(Path(__file__).with_name("moe_ranks.py"))
    start(ranks, script, *options.split(), *(["--no-symmetric"] if problem else []))
    if problem:
        pytest.skip(f"the others hold, but symmetric memory was not tested: {problem}")


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_training_over_symmetric_memory_is_bitwise_eager(granularity):
    """With so little room at first that it has to grow, on all ranks and in all layers."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    if problem := symmetric_problem(torch.device("cuda"), 2):
        pytest.skip(problem)
    options = (
        "--model.num-layers 3 --model.vocab-size 4096 --graph.capacities 512x16,1024x32 --steps 6 "
        "--run.tokens-per-step 4096 --parallel.ep 2 --parallel.dispatcher symmetric "
        "--parallel.expert-room 1 "
        f"--graph.granularity {granularity}"
    )
    printed = start(2, "-m", "packgraph.cli", "verify", "moonlight", *options.split())
    assert "1 of 1 runs bitwise equal on every rank" in printed
