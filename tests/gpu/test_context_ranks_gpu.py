"""Rows spread over ranks by NCCL; each test starts ranks by torchrun and needs that many GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["--granularity chunk", "--granularity layer --steps 20"])
def test_graphs_of_every_number_of_ranks_equal_eager_bitwise(ranks, options):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = Path(__file__).with_name("context_ranks.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    project = script.parents[2]
    places = (project / "src", project / "tests" / "helpers", project / "benchmarks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    done = subprocess.run(
        [*torchrun, str(script), *options.split()],
        check=False,
        timeout=300,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == (3 if ranks == 2 else 5) and "WRONG" not in done.stdout
