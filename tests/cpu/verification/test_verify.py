"""Verify finds nothing where graphs are right, and names the tensor where they are not."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from verifykit import break_gradient, break_random_state

from packgraph import cli
from packgraph.graphs.graphed import graph
from packgraph.graphs.step import GraphedStep
from packgraph.packing.capacity import Capacity
from packgraph.train import strategies
from packgraph.train.random_state import random_states
from packgraph.verification import command
from packgraph.verification.command import print_report
from packgraph.verification.compare import first_difference
from packgraph.verification.matrix import CAPACITIES, default_matrix, random_packs, tiny_config
from packgraph.verification.ranks import RanksReport
from packgraph.verification.verify import VerifyReport, verify

CPU = torch.device("cpu")


def test_equal_tensors_are_equal_bit_by_bit() -> None:
    values = {
        "a": torch.tensor([1.0, float("nan"), -0.0]),
        "empty": torch.zeros(0),
        "flag": torch.tensor(True),
    }
    assert (
        first_difference(1, values, {name: value.clone() for name, value in values.items()}) is None
    )


def test_the_first_difference_has_a_name_and_a_size() -> None:
    values = {"a": torch.ones(4), "b": torch.tensor([1.0, 2.0])}
    found = first_difference(3, values, {"a": torch.ones(4), "b": torch.tensor([1.0, 2.5])})
    assert str(found) == "step 3: b: 1 of 2 elements, largest distance 0.5 (largest value 2)"
    found = first_difference(1, {"zero": torch.zeros(1)}, {"zero": -torch.zeros(1)})
    assert found is not None and "1 of 1 elements" in found.size
    assert "only in the eager run" in str(first_difference(1, values, {"a": torch.ones(4)}))
    assert "only in the graph run" in str(first_difference(1, {}, values))
    assert "torch.float32 [4] against torch.float64 [4]" in str(
        first_difference(1, values, {"a": torch.ones(4).double(), "b": values["b"]})
    )


@pytest.mark.slow
def test_the_default_matrix_is_bitwise_equal() -> None:
    reports = list(default_matrix(CPU, steps=6))
    assert len(reports) == 12 and all(report.good for report in reports)
    assert sum("granularity layer" in report.title for report in reports) == 7
    assert all(report.replayed > 0 and set(report.fallbacks) == {"warm-up"} for report in reports)


def test_the_matrix_draws_all_capacities() -> None:
    assert {batch.capacity for batch in itertools.islice(random_packs(1), 30)} == set(CAPACITIES)


def test_a_broken_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_gradient(monkeypatch)
    report = verify("broken", tiny_config("layer", 0.0, 4), random_packs(1), CPU)
    assert not report.good and not report.differences.get("random states")
    assert str(report.differences["gradients"]).startswith("step 3: norm.weight:")
    assert report.differences["parameters"].step == 3


def test_a_random_state_that_graphs_move_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_random_state(monkeypatch)
    report = verify("broken", tiny_config("chunk", 0.0, 3), random_packs(1), CPU)
    assert {kind: difference.name for kind, difference in report.differences.items()} == {
        "random states": "cpu"
    }


@pytest.mark.parametrize("optimizer", [False, True])
def test_graphs_of_whole_steps_are_verified(
    optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("chunk", 0.1, 3)
    config = replace(
        config, graph=replace(config.graph, granularity="step", optimizer=optimizer, strict=True)
    )
    report = verify("whole steps", config, random_packs(1), CPU)
    assert report.good and set(report.fallbacks) <= {"warm-up"}
    original = GraphedStep.replay

    def broken(self: GraphedStep, *args: Any) -> Any:
        result = original(self, *args)
        with torch.no_grad():
            dict(self.modules[0].named_parameters())["norm.weight"].mul_(1.01)
        return result

    monkeypatch.setattr(GraphedStep, "replay", broken)
    report = verify("broken", config, random_packs(1), CPU)
    assert not report.good and report.differences["parameters"].step == 3


def test_graphs_of_compiled_layers_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same compiled code without graphs; compiled by a backend that is quick."""
    made = []

    def quick(*args: Any, compile: bool, **kwargs: Any) -> Any:
        made.append(graph(*args, compile="aot_eager" if compile else False, **kwargs))
        return made[-1]

    monkeypatch.setattr(strategies, "graph", quick)
    config = tiny_config("chunk", 0.0, 3)
    report = verify(
        "compiled", replace(config, graph=replace(config.graph, compile=True)), random_packs(1), CPU
    )
    assert report.good and [graphed.stats.compiled > 0 for graphed in made] == [True, True]
    assert made[0].stats.replayed == 0 < made[1].stats.replayed


def test_rows_of_every_size_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    packs = list(itertools.islice(random_packs(1), 8))
    report = verify("rows", tiny_config("layer", 0.0, 9), iter(packs), CPU)
    assert (
        report.rows == Counter(pack.capacity for pack in packs)
        and report.rows.total() == report.microbatches == 8
    )
    shown = VerifyReport(
        "run",
        rows=Counter({Capacity(1024, 32): 80, Capacity(512, 16, 128): 1, Capacity(512, 16): 2}),
    )
    print_report(RanksReport("run", (shown,), None), Console(width=100))
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "sizes of rows 512x16x128: 1, 512x16: 2, 1024x32: 80 replayed / fallbacks" in text


def test_nothing_replayed_is_no_success() -> None:
    config = tiny_config("layer", 0.0, 2)
    assert not verify("only warm-up", config, random_packs(1), CPU).good
    for failed, good in ((0, True), (11, True), (12, False)):
        assert (
            VerifyReport(
                "run", replayed=12, fallbacks={"warm-up": 99, "capture failed": failed}
            ).good
            == good
        )


def test_verify_changes_no_random_state_of_its_own_draws() -> None:
    torch.manual_seed(0)
    first = [batch.data for batch in itertools.islice(random_packs(5), 4)]
    before = random_states(CPU)["cpu"]
    second = [batch.data for batch in itertools.islice(random_packs(5), 4)]
    assert torch.equal(before, random_states(CPU)["cpu"])
    assert all(torch.equal(left, right) for left, right in zip(first, second))


def test_the_command_ends_with_zero_or_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = lambda *given: itertools.islice(default_matrix(*given), 2)  # noqa: E731
    monkeypatch.setattr(command, "default_matrix", two)
    assert cli.main(["verify", "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 runs bitwise equal" in text and text.count("bitwise equal") == 3
    assert "granularity layer, dropout 0.1" in text and "random states" not in text
    assert cli.main(["verify", "--steps", "3", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert text.count("random states") == 2 and text.count("bitwise equal") == 3 + 4 * 2
    break_gradient(monkeypatch)
    assert cli.main(["verify", "--steps", "3"]) == 1
    text = capsys.readouterr().out
    assert "norm.weight" in text and "0 of 2 runs bitwise equal" in text
    assert text.count("DIFFERS: gradients") == 2
