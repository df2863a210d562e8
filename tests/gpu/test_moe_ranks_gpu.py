"""Dispatchers over NCCL and symmetric memory; each test starts ranks by torchrun and needs that many GPUs."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packgraph.moe.symmetric_buffers import symmetric_problem

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


def start(ranks, *options):
    script = Path(__file__).with_name("moe_ranks.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    tests = script.parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests.parent / 'src'}{os.pathsep}{tests}"}
    subprocess.run([*torchrun, str(script), *options], check=True, timeout=300, env=environment)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["--tokens 1024", "--tokens 256 --places 1"])
def test_dispatchers_and_replays_have_the_same_bits(ranks, options):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    problem = symmetric_problem(torch.device("cuda"), ranks)
    start(ranks, *options.split(), *(["--no-symmetric"] if problem else []))
    if problem:
        pytest.skip(f"the others hold, but symmetric memory was not tested: {problem}")
