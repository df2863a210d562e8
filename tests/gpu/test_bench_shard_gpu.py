"""The benchmark of sharded training over NCCL, by two ranks that torchrun starts: every way
computes what the first one does, and its row has every figure. Needs 2 GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benchmarks" / "bench.py"


def test_every_way_trains_the_same_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    rows = tmp_path / "rows.jsonl"
    ways = "none alone parameters parameters+quiet none+step fsdp fsdp+prefetch fsdp-keep"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
    shape = "--model qwen3-0.6b --layers 4 --tokens 1024 --step-tokens 2048 --rounds 2 --exchanges"
    subprocess.run(
        [
            sys.executable,
            *f"{torchrun} {BENCH} shard {shape} --commit abc123 --ways {ways}".split(),
            "--out",
            str(rows),
        ],
        check=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [row["way"] for row in found] == ways.split()
    for row in found:
        assert row["reason"] is None, f"{row['way']}: {row['reason']}"
        assert min(row["peak_bytes"]) > 0 and row["communication_ms"] is not None
        if row["way"] in ("alone", "parameters+quiet"):
            continue
        assert row["agrees"], f"{row['way']}: {row['loss_difference']}"
        assert row["communication_ms"] > 0
        assert row["communication_ms"] >= row["exposed_ms"] >= 0
