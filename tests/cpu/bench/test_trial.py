"""`packgraph.try_module` and `packgraph try`: is it faster for me?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import packgraph
from packgraph import cli
from packgraph.bench import trial
from packgraph.bench.trial import BOTH, COMPILE, EAGER, GRAPH, Trial

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Asks(nn.Module):
    """Waits for a value on the host, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return found * 2 if found.sum().item() > 0 else found


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(2 + number % 2, 4) for number in range(count)]


def row(ratio: float | None, **more: Any) -> dict[str, Any]:
    figures = {} if ratio is None else {"ms_per_1000_tokens": {"median": 10 / ratio}}
    return {"figures": figures, "ratio": ratio, "reason": None, "agrees": None} | more


def test_every_way_runs_the_same_and_leaves_the_module_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = packgraph.try_module(model, batches(), compile="aot_eager")
    assert list(found.rows) == [EAGER, COMPILE, GRAPH, BOTH]
    assert all(each["reason"] is None for each in found.rows.values())
    assert all(each["agrees"] for each in found.rows.values()) and found.rows[EAGER]["ratio"] == 1
    assert found.rows[GRAPH]["loss_difference"] == found.rows[GRAPH]["gradient_difference"] == 0
    assert found.fallbacks == {GRAPH: {}, BOTH: {}} and found.unit == "calls"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "Graphs gain nothing on a CPU" in str(found) and "calls/s" in str(found)


def test_packed_batches_are_counted_in_tokens_and_unused_parameters_are_left_out() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.unused = nn.Embedding(9, 4), nn.Linear(2, 2)
            self.unused.requires_grad_(False)

        def forward(self, batch: packgraph.PackedBatch) -> Tensor:
            return self.embedding(batch.tokens).square().sum()

    packs = packgraph.pack([[1, 2, 3], [4, 5]], [packgraph.Capacity(8, 4)])
    found = packgraph.try_module(Counts(), packs, compile="aot_eager")
    assert found.unit == "tokens" and found.rows[BOTH]["agrees"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_few_bits_may_differ_by_more(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Gradients of an embedding whose rows occur often are sums in bfloat16 in eager."""
    measured = trial._Ways.check

    def rounded(ways: Any, way: Any) -> Any:
        found = measured(ways, way)
        return replace(found, loss=found.loss * (1.0 if way.name == EAGER else 1.001))

    monkeypatch.setattr(trial._Ways, "check", rounded)
    model = nn.Linear(4, 1, dtype=dtype)
    inputs = [torch.ones(2, 4, dtype=dtype)]
    found = packgraph.try_module(model, inputs, compile="aot_eager")
    assert found.rows[GRAPH]["agrees"] == (dtype == torch.bfloat16)


def test_what_runs_eagerly_is_told_with_its_reason() -> None:
    with pytest.warns(packgraph.PackgraphWarning):
        found = packgraph.try_module(Asks(), batches(1), compile="aot_eager")
    (reason,) = found.fallbacks[GRAPH]
    assert f"graph: {found.fallbacks[GRAPH][reason]} calls ran eagerly: {reason}" in str(found)


def test_a_way_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: nn.Module, **options: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(trial, "WAYS", (EAGER, GRAPH, COMPILE))
    found = packgraph.try_module(nn.Linear(4, 4), batches())
    assert "compile: RuntimeError: no compiler here" in str(found)
    assert found.rows[GRAPH]["ratio"] is not None and found.rows[COMPILE]["ratio"] is None


def test_an_interrupt_ends_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(module: Any, **_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "compile", interrupted)
    monkeypatch.setattr(trial, "WAYS", (EAGER, GRAPH, COMPILE))
    found = packgraph.try_module(nn.Linear(8, 8), [torch.randn(3, 8)], compile="aot_eager")
    assert found.rows[GRAPH]["ratio"] is not None
    assert "no round was run" in str(found)
    monkeypatch.setattr(trial, "WAYS", (COMPILE, EAGER))
    with pytest.raises(KeyboardInterrupt):
        packgraph.try_module(nn.Linear(8, 8), [torch.randn(3, 8)], compile="aot_eager")


def test_the_report_ends_with_the_lines_to_change() -> None:
    rows = {EAGER: row(1.0), COMPILE: row(None, reason="ran out"), GRAPH: row(1.5), BOTH: row(2.0)}
    change = {BOTH: "model = packgraph.graph(model, compile=True)"}
    lines = str(Trial(rows, {}, "m", "a GPU", change=change)).splitlines()
    assert lines[-3:] == [f"{BOTH} is 2.00 times as fast as eager. The lines to change:", "",
                          f"    {change[BOTH]}"]  # fmt: skip
    assert "compile: ran out" in lines
    slower = str(Trial({EAGER: row(1.0), GRAPH: row(1.01)}, {}, "m", "a GPU"))
    assert slower.endswith("Nothing is faster than eager here by more than 3 %: change nothing.")


def test_no_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        packgraph.try_module(nn.Linear(4, 4), [])


def test_the_command_times_a_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "WAYS", (EAGER, GRAPH))
    small = ["--model.hidden-size", "32", "--model.intermediate-size", "64", "--graph.capacities"]
    assert cli.main(["try", "qwen3-tiny", *small, "64x8", "--data.overlong", "split"]) == 0
    told = capsys.readouterr()
    assert "qwen3-tiny: forward and backward of 8 rows" in told.out and "equal" in told.out
    assert told.err == "eager ...\ngraph ...\n"
    assert cli.main(["try", "qwen3-tiny", *small, "64x8", "--seconds", "1e-9"]) == 1
    assert "the limit of 1e-09 seconds was reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "which preset? For example: packgraph try qwen3-tiny"),
        (["qwen3-tny"], "did you mean qwen3-tiny?"),
        (["qwen3-tiny", "--seconds", "0"], "--seconds must be positive, got 0"),
    ],
)
def test_wrong_words_are_told(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert cli.main(["try", *words]) == 2
    assert text in capsys.readouterr().err
