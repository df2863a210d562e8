"""Rows cut in zigzag over NCCL; the test starts ranks by torchrun and needs that many GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_cut_in_zigzag_replay_with_the_bits_of_eager_and_equal_whole_rows(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = Path(__file__).with_name("zigzag_ranks.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    helpers = script.parents[1] / "helpers"
    environment = os.environ | {"PYTHONPATH": f"{script.parents[2] / 'src'}{os.pathsep}{helpers}"}
    subprocess.run([*torchrun, str(script)], check=True, timeout=300, env=environment)
