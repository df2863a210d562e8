"""Benchmarks: every way asked for has a row that is valid JSON, with figures or with the reason why
there are none."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bench_pipeline
import pytest
import torch
from bench import main
from bench_pipeline import PipelineArguments, PipelineWay, measure_pipeline
from bench_step import StepComparison
from bench_ways import Graphed, compiled_stack
from benchkit import SMALL
from distkit import run_ranks

from packgraph.bench.comparison import (
    Check,
    Deadline,
    Results,
    Sample,
    groups,
    rounds_in_turn,
)
from packgraph.bench.rows import Rows, facts, figures, why
from packgraph.parallel.layout import Layout
from packgraph.parallel.pipeline.links import make_links

CPU = torch.device("cpu")


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def options(**changes: Any) -> PipelineArguments:
    usual: dict[str, Any] = {
        "model": "tiny",
        "layers": None,
        "tokens": (32,),
        "documents": 4,
        "ways": ("eager", "layer", "chunk", "step"),
        "rounds": 2,
        "mean": 10.0,
        "sigma": 0.5,
        "seed": 0,
        "pp": 2,
        "chunks": 1,
        "microbatches": 3,
    }
    return PipelineArguments(**(usual | changes))


def test_figures_of_known_values() -> None:
    assert figures([3.0, 1.0, 2.0]) == {"median": 2.0, "p10": 1.2, "p90": 2.8, "p99": 2.98, "n": 3}


def test_every_way_begins_a_round_in_its_turn() -> None:
    seen: list[str] = []
    runs = {name: lambda number, name=name: seen.append(f"{name}{number}") for name in "abc"}
    rounds_in_turn(runs, 4, lambda: len(seen) >= 9)
    assert seen == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]


def test_ways_are_grouped_with_the_first() -> None:
    ways = ["eager", "layer", "chunk", "auto"]
    assert groups(ways, None) == groups(ways, 9) == groups(ways, 4) == [ways]
    assert groups(ways, 2) == [["eager", "layer"], ["eager", "chunk"], ["eager", "auto"]]
    assert groups(ways, 3) == [["eager", "layer", "chunk"], ["eager", "auto"]] and groups(
        ["eager"], 2
    ) == [["eager"]]
    assert groups(ways, 1) == [[way] for way in ways]


def test_ways_by_themselves_are_compared_with_the_first_one_that_was() -> None:
    first = Results(["eager"])
    first.samples["eager"] = [Sample({"ms": 30.0}, 100.0)]
    first.checks["eager"] = Check(1.0, 2.0)
    then = Results(["chunk"], first)
    then.samples["chunk"], then.checks["chunk"] = [Sample({"ms": 10.0}, 100.0)], Check(1.0, 2.0)
    row = then.row("chunk", "ms", 1e-5)
    assert row["ratio"] == 3.0 and row["against"] == "eager" and row["agrees"]


def test_rows_compare_with_the_first_way_and_keep_reasons() -> None:
    contest = Results(["eager", "chunk", "other", "odd"])
    contest.samples["eager"] = [Sample({"ms": 30.0}, 100.0)] * 3
    contest.samples["chunk"] = [Sample({"ms": 10.0}, 100.0)] * 3
    contest.samples["odd"] = [Sample({"ms": 10.0}, 100.0)]
    contest.checks |= {
        "eager": Check(2.0, 1.0),
        "chunk": Check(2.0, 1.0),
        "odd": Check(float("nan"), 1.0),
    }

    contest.drop("other", why(torch.OutOfMemoryError("tried to allocate 20 GiB")))
    row = contest.row("chunk", "ms", 1e-2)
    assert row["ratio"] == 3.0 and row["figures"]["ms_per_1000_tokens"]["median"] == 100.0
    assert row["agrees"] is True and row["reason"] is None
    row = contest.row("other", "ms", 1e-2)
    assert row["figures"] == {} and row["reason"] == "OutOfMemoryError: tried to allocate 20 GiB"
    row = contest.row("odd", "ms", 1e-2)
    assert row["agrees"] is False and row["loss_difference"] == 1e30 and row["loss"] is None


def test_bench_step_writes_a_row_for_every_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    words = [
        "step",
        *SMALL,
        "--ways",
        "eager",
        "reduce-overhead",
        "layer",
        "chunk",
        "--rounds",
        "3",
        "--calls",
        "2",
        "--out",
        str(out),
        "--commit",
        "abc123",
        "--attention",
        "sdpa",
        "--together",
        "3",
    ]
    assert main(words) == 0
    captured = capsys.readouterr()
    rows = rows_of(captured.out)
    assert captured.out == out.read_text() and "bench step" in captured.err
    assert [row["way"] for row in rows] == ["eager", "reduce-overhead", "layer", "chunk"]
    for row in rows:
        assert row["benchmark"] == "step" and row["tokens"] == 32 and row["commit"] == "abc123"
        assert row["attention"] == "sdpa" and row["part"] == "model"
        assert set(row["versions"]) == {
            "python",
            "torch",
            "cuda",
            "packgraph",
            "triton",
            "flash-attn-4",
        }
        assert row["device"].startswith("cpu")
        if row["way"] == "reduce-overhead":
            assert "none on a CPU" in row["reason"] and row["figures"] == {}
            continue
        assert row["reason"] is None and row["loss_difference"] == row["gradient_difference"] == 0.0
        assert row["figures"]["device_ms"]["n"] == 6 and row["rounds"] == 3
        assert row["ratio"] > 0 and 0 <= row["padding"] < 0.5
    assert rows[2]["capture_seconds"] > 0 and rows[3]["pool_bytes"] > 0


def test_a_way_that_fails_in_the_middle_keeps_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    run, calls = Graphed.run, []

    def sometimes(self: Graphed, batch: Any) -> Any:
        calls.append(self.name)
        if len(calls) == 8:
            raise RuntimeError("the device is\non fire")
        return run(self, batch)

    with mock.patch.object(Graphed, "run", sometimes):
        assert (
            main(
                [
                    "step",
                    *SMALL,
                    "--ways",
                    "eager",
                    "chunk",
                    "--rounds",
                    "4",
                    "--calls",
                    "1",
                ]
            )
            == 0
        )
    eager, chunk = rows_of(capsys.readouterr().out)
    assert eager["figures"]["device_ms"]["n"] == 4
    assert chunk["reason"] == "RuntimeError: the device is on fire" and chunk["figures"] == {}


def test_time_limits_leave_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", *SMALL, "--ways", "eager", "chunk", "--seconds", "1e-9"]) == 1
    assert all(
        "limit of 1e-09 seconds" in row["reason"] for row in rows_of(capsys.readouterr().out)
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["step", "--seconds", "-1"], "--seconds must be positive"),
        (["step", "--out", "/no/such/folder/x"], "does not exist"),
        (["step", "--ways", "eager", "eager"], "names a way twice"),
        (["step", "--together", "0"], "expected a whole number of at least 1"),
        (["step", "--attention", "naive"], "--attention: expected own | sdpa"),
        (["step", "--tokens", "0"], "expected a whole number of at least 1"),
        (["unknown"], "no benchmark 'unknown'. Known: step, "),
    ],
)
def test_mistakes_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == "" and "Traceback" not in captured.err


def measured(
    mesh: Any, chosen: PipelineArguments, broken: str | None = None
) -> list[dict[str, Any]]:
    """All rows of one rank. broken: the way that fails on the last rank while it gets ready."""
    rows = Rows(facts(CPU, "abc123"), write=False)
    warm_alone, eager_stack = PipelineWay.warm_alone, partial(compiled_stack, backend="eager")

    def break_down(self: PipelineWay, batch: Any) -> None:
        if self.name == broken and mesh.rank == mesh.world - 1:
            raise RuntimeError("no room")
        warm_alone(self, batch)

    with (
        mock.patch.object(PipelineWay, "warm_alone", break_down),
        mock.patch.object(bench_pipeline, "compiled_stack", eager_stack),
    ):
        measure_pipeline(chosen, CPU, make_links(mesh), rows, Deadline(None))
    return rows.all


@pytest.mark.dist
def test_bench_pipeline_on_two_ranks() -> None:
    ways = ("eager", "compile", "layer", "chunk", "step")
    one, two = run_ranks(measured, 2, options(ways=ways), layout=Layout(pp=2))
    assert tuple(row["way"] for row in one) == ways
    for mine, other in zip(one, two, strict=True):
        json.dumps(mine)
        assert mine == other, "all ranks know the same"
        assert mine["reason"] is None and mine["loss_difference"] == 0.0 and mine["agrees"]
        assert mine["figures"]["step_ms"]["n"] == 2 and 0 < mine["bubble_share"] < 1
        assert (mine["pool_bytes"] is None) == (mine["way"] in ("eager", "compile"))
    assert (
        one[3]["slots"] == [[2], [1]]
        and len(one[3]["pool_bytes"]) == 2
        and len(one[3]["stage_ms"]) == 2
    )


# ---- a benchmark that is asked to end


def test_rows_of_finished_rounds_are_written_when_a_time_limit_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time, rounds = StepComparison.time, []

    def ends_in_the_fifth(self, way, number):
        rounds.append(number)
        if len(rounds) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return time(self, way, number)

    monkeypatch.setattr(StepComparison, "time", ends_in_the_fifth)
    words = ["step", *SMALL, "--ways", "eager", "chunk", "--rounds", "9", "--calls", "1"]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in rows] == ["eager", "chunk"]
    assert all(row["rounds"] == 2 and row["figures"] for row in rows)
