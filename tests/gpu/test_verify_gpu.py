"""`packgraph verify` over NCCL: a small model at every layout of as many GPUs as there are, two at
most."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
SOURCE = Path(__file__).parents[2] / "src"


def test_verify_over_nccl():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    done = subprocess.run(
        [*torchrun, "-m", "packgraph.cli", "verify", "--steps", "8"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "6 of 6 runs bitwise equal on every rank" in done.stdout
