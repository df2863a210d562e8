"""Tensor and data parallelism over NCCL; each test starts two ranks by torchrun and needs that many
GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize(
    "options",
    [
        "--tp 2 --sequence",
        "--tp 2 --granularity layer",
        "--tp 2 --sequence --precision fp8",
        "--tp 2 --granularity layer --precision fp8_weight_gradients",
        "--tp 1",
        "--tp 1 --granularity layer",
        "--tp 1 --shard gradients --granularity layer",
        "--tp 1 --shard parameters --granularity layer",
        "--tp 1 --shard parameters",
    ],
)
def test_graphs_equal_eager_over_nccl(options):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    script = Path(__file__).with_name("parallel_ranks.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    helpers = script.parents[1] / "helpers"
    environment = os.environ | {"PYTHONPATH": f"{script.parents[2] / 'src'}{os.pathsep}{helpers}"}
    subprocess.run(
        [*torchrun, str(script), *options.split()], check=True, timeout=300, env=environment
    )
