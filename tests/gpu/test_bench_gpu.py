"""Benchmarks on a GPU: every way runs, computes what eager does, and its row has every figure."""

import json

import pytest
import torch
from bench import STEP_WAYS, AllStepArguments, measure_step

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = tuple(
    name
    for name in STEP_WAYS
    if not name.endswith("+compile") and name not in ("compile", "reduce-overhead")
)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def no_rows() -> Rows:
    return Rows(facts(device(), "abc123"), write=False)


def check(rows: Rows) -> None:
    for row in rows.all:
        json.dumps(row)
        assert row["reason"] is None, f"{row['way']}: {row['reason']}"
        assert row["agrees"], (
            f"{row['way']}: {row['loss_difference']}, {row['gradient_difference']}"
        )
        assert row["gpu_busy"] is not None and 0 < row["gpu_busy"] <= 1 and row["kernel_ms"] > 0, (
            row["gpu_busy_reason"]
        )
        assert row["mfu"] > 0 and row["peak_bytes"] > 0


@pytest.mark.parametrize("part", ["layers", "model"])
def test_every_way_without_a_compiler(part: str) -> None:
    rows = no_rows()
    measure_step(
        AllStepArguments(
            model="qwen3-0.6b",
            layers=2,
            tokens=(512,),
            ways=PLAIN,
            rounds=3,
            calls=2,
            mean=100.0,
            sigma=1.0,
            part=part,
            buckets=3,
        ),
        device(),
        rows,
        Deadline(None),
    )
    check(rows)
    assert all(row.get("by_autograd", 0) == 0 for row in rows.all)


@pytest.mark.slow
def test_every_way_with_a_compiler() -> None:
    rows, ways = no_rows(), ("eager", *(name for name in STEP_WAYS if name not in PLAIN))
    measure_step(
        AllStepArguments(
            model="qwen3-0.6b",
            layers=2,
            tokens=(512,),
            ways=ways,
            rounds=3,
            calls=2,
            mean=100.0,
            sigma=1.0,
            part="layers",
            buckets=2,
        ),
        device(),
        rows,
        Deadline(None),
    )
    check(rows)
