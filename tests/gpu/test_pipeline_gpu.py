"""Pipelines over NCCL; each test starts its ranks by torchrun and needs that many GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize(
    ("ranks", "chunks", "layers"), [(2, 1, 4), (4, 2, 8)], ids=["PP2", "PP4xVPP2"]
)
def test_graphs_equal_eager_over_nccl(ranks, chunks, layers):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    script = Path(__file__).with_name("pipeline_ranks.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    command = [
        *torchrun,
        str(script),
        "--chunks",
        str(chunks),
        "--layers",
        str(layers),
        "--soak",
        "20",
    ]
    subprocess.run(command, check=True, timeout=500)
