"""Layers with experts on a GPU: every way of `bench moe` runs, computes what the first does, and
has every figure."""

import json

import pytest
import torch
from bench import AllMoeArguments, measure_step
from expert_ways import MOE_WAYS

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = (
    "host-splits",
    "eager",
    "chunk",
    "partial",
    "chunk+stash",
    "layer",
    "auto",
    "graphed-callables",
    "whole-padded",
)
PEERS = ("transformers", "transformers+compile")


def rows_of(
    ways: tuple[str, ...], part: str = "layers", layers: int = 2, room: float = 1.0
) -> list[dict]:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = Rows(facts(device, "abc123"), write=False)
    measure_step(
        AllMoeArguments(
            model="moonlight",
            layers=layers,
            tokens=(512,),
            ways=ways,
            rounds=3,
            calls=2,
            mean=100.0,
            sigma=1.0,
            part=part,
            buckets=2,
            room=room,
        ),
        device,
        rows,
        Deadline(None),
    )
    for row in rows.all:
        json.dumps(row)
        assert row["reason"] is None, f"{row['way']}: {row['reason']}"
        assert row["agrees"], (
            f"{row['way']}: {row['loss_difference']}, {row['gradient_difference']}"
        )
        assert row["mfu"] > 0 and row["peak_bytes"] > 0 and row["gpu_busy"] is not None, row[
            "gpu_busy_reason"
        ]
    return rows.all


@pytest.mark.parametrize("part", ["layers", "model"])
def test_every_way_without_a_compiler(part):
    found = {row["way"]: row for row in rows_of(PLAIN, part)}
    # The same kernels on the same rows: host-splits multiplies fewer rows, which kernels may do in
    # another order.
    assert found["chunk+stash"]["loss_difference"] == found["chunk"]["loss_difference"]
    assert found["chunk+stash"]["stash_pages"] > 0 and found["chunk+stash"]["by_autograd"] == 0


@pytest.mark.slow
def test_every_way_with_a_compiler():
    found = {
        row["way"]: row
        for row in rows_of(
            ("host-splits", *(way for way in MOE_WAYS if way not in (*PLAIN, *PEERS)))
        )
    }
    assert found["chunk+compile+stash"]["loss"] == found["chunk+compile"]["loss"]


def test_a_stash_takes_less_than_room_for_twice_the_rows():
    exact, static, stashed = rows_of(("host-splits", "chunk", "chunk+stash"), layers=6, room=2.0)
    assert exact["peak_ratio"] == exact["expert_ratio"] == 1.0 and static["expert_ratio"] == 2.0
    assert (
        stashed["peak_ratio"] < static["peak_ratio"]
        and stashed["slot_bytes"] < static["slot_bytes"]
    )


@pytest.mark.slow
def test_the_layers_of_transformers():
    pytest.importorskip("transformers")
    rows_of(("eager", *PEERS))
