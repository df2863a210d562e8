"""Benchmarks on a GPU: every way runs, computes what eager does, and its row has every figure."""

import json
import time

import pytest
import torch
from bench import STEP_WAYS, AllStepArguments, measure_step
from bench_attention import AttentionArguments, bench_attention, usual_backends
from bench_capture import CaptureArguments, bench_capture
from bench_memory import MemoryArguments, bench_memory
from bench_models import shape
from step_figures import busy_time

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


def test_attention_memory_and_capture_have_figures() -> None:
    rows, backends = no_rows(), usual_backends(shape("qwen3-0.6b"), device())
    bench_attention(
        AttentionArguments(model="qwen3-0.6b", tokens=(1024,), ways=backends, draws=2, mean=100.0),
        device(),
        rows,
        Deadline(None),
    )
    bench_memory(
        MemoryArguments(model="qwen3-0.6b", layers=2, part="layers", tokens=(1024,), banks=(1, 4)),
        device(),
        rows,
        Deadline(None),
    )
    bench_capture(
        CaptureArguments(
            model="qwen3-0.6b",
            layers=2,
            part="layers",
            tokens=(512,),
            ways=("chunk",),
            banks=(1, 2),
        ),
        device(),
        rows,
        Deadline(None),
    )
    assert [row["reason"] for row in rows.all] == [None] * len(rows.all)
    memory = [row for row in rows.all if row["benchmark"] == "memory"]
    assert all(row["peak_bytes"] > 0 and row["reserved_bytes"] > 0 for row in memory)
    assert memory[2]["peak_ratio"] < memory[1]["peak_ratio"] * 1.1, (
        "a bank is as large as its largest bucket"
    )


def test_a_device_that_is_never_idle_is_busy() -> None:
    left = torch.randn(4096, 4096, device=device(), dtype=torch.bfloat16)
    busy = busy_time(device(), lambda: [left @ left for _ in range(50)], lambda: left @ left)
    assert busy is not None and busy[0] > 0 and busy[1] > 0.9
    idle = busy_time(device(), lambda: (left @ left, time.sleep(0.02), left @ left), lambda: None)
    assert idle is not None and idle[1] < 0.5
