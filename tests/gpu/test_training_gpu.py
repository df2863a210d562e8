"""The trainer over NCCL, replicas, stages and tensor parallel ranks together; each test needs as
many GPUs as it starts ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, "--pp 2 --chunks 2 --tied"),
        (2, "--tp 2 --granularity step --optimizer"),
        (2, "--tp 2 --precision fp8 --compile"),
        (2, "--granularity step --optimizer"),
        (2, "--pp 2 --tied --granularity step --optimizer"),
        (2, "--granularity step --optimizer --shard gradients"),
        (2, "--granularity step --optimizer --shard parameters"),
        (2, "--cp 2 --granularity step --optimizer --shard parameters"),
        (2, "--ep 2 --granularity step --optimizer --shard parameters"),
        (4, "--tp 2 --pp 2 --tied"),
        (4, "--tp 2 --pp 2 --granularity layer"),
        (4, "--tp 2 --granularity step --optimizer --shard parameters"),
        (4, "--pp 2 --chunks 2 --tied"),
        (4, "--pp 2 --tied --granularity step --optimizer"),
        (4, "--pp 2 --granularity step --optimizer --shard parameters"),
    ],
)
def test_graphs_train_as_eager_does_over_nccl(ranks, options):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = Path(__file__).with_name("training_ranks.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    source = script.parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run(
        [*torchrun, str(script), *options.split(), "--layers", "4"],
        check=True,
        timeout=500,
        env=environment,
    )
