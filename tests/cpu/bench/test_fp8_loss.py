"""The comparison of losses in float8: which rows belong together, and what the control is."""

from typing import Any

import pytest
import torch
from fp8_loss import CONTROL, LIMIT, ROUNDING, compare, difference, digest, move_by_roundings
from torch import nn

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity


def row(way: str, seed: int = 0, mean: float = 2.0, **changed: Any) -> dict[str, Any]:
    return {
        "benchmark": "fp8_loss",
        "way": way,
        "seed": seed,
        "mean_of_last": mean,
        "held_out": mean + 1,
        "last": 50,
        "data": "abc",
        "tokens_per_step": 16_000,
        "optimizer": {"learning_rate": 3e-4},
        "device": "H100",
        "torch": "2.11",
        **changed,
    }


def test_runs_of_several_files_are_compared_by_seed() -> None:
    rows = [row("fp8", 1, 2.002), row("bf16"), row(CONTROL, mean=2.1), row("fp8", mean=1.998)]
    table, within = compare([*rows, row(CONTROL, 1), row("bf16", 1)])
    assert within  # whatever the control does
    assert table.splitlines()[2:] == [
        "| 0 | 2.0000 | 3.0000 | bf16+rounding | +5.00% | +3.33% |",
        "| 0 | 2.0000 | 3.0000 | fp8 | -0.10% | -0.07% |",
        "| 1 | 2.0000 | 3.0000 | bf16+rounding | +0.00% | +0.00% |",
        "| 1 | 2.0000 | 3.0000 | fp8 | +0.10% | +0.07% |",
    ]


@pytest.mark.parametrize("mean", [2.02, 1.98])
def test_a_run_beyond_the_limit_either_way_is_told(mean: float) -> None:
    rows = [row("bf16"), row(CONTROL), row("fp8", mean=mean)]
    assert abs(difference(rows[2], rows[0], "mean_of_last")) > LIMIT
    assert not compare(rows)[1]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row("bf16"), row(CONTROL), row("fp8", data="else")], "differ in data"),
        ([row("bf16"), row(CONTROL), row("fp8", device="H200")], "differ in device"),
        ([row(CONTROL), row("fp8")], "has no run in bf16"),
        ([row("bf16"), row("fp8")], "needs bf16"),
        ([row("bf16"), row(CONTROL)], "float8 run"),
        ([], "float8 run"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    rows: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        compare(rows)


def test_the_control_moves_weights_by_one_rounding_and_by_its_seed() -> None:
    weight = torch.randn(64, 512).to(torch.bfloat16)

    def moved(seed: int) -> torch.Tensor:
        parameter = nn.Parameter(weight.clone())
        move_by_roundings([parameter], seed)
        return parameter.detach()

    found = moved(0)
    assert torch.equal(found, moved(0))
    assert not torch.equal(found, moved(1))
    assert 0.2 < (found != weight).float().mean() < 0.45
    apart = (found.float() / weight.float() - 1).abs()
    assert 0 < apart.max() <= 2 * ROUNDING  # one step of bfloat16, no more


def test_a_digest_knows_contents_and_steps() -> None:
    one, two = (PackedBatch.build([[token] * 5], Capacity(16, 2)) for token in (1, 2))
    assert digest([[one, two]]) == digest([[one, two]])
    assert len({digest(steps) for steps in ([[one, two]], [[one], [two]], [[two, one]])}) == 3
