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
from bench_models import SHAPES, draw_batches, shape
from bench_pipeline import PipelineArguments, PipelineWay, measure_pipeline
from bench_step import StepComparison
from bench_ways import Graphed, compiled_stack
from benchkit import SMALL
from distkit import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from packgraph.bench.comparison import (
    Check,
    Deadline,
    Results,
    Sample,
    groups,
    room_for_code,
    rounds_in_turn,
)
from packgraph.bench.rows import Rows, facts, figures, why
from packgraph.models.decoder import DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import single_process
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


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_figures_are_ordered_and_within_the_values(values: list[float]) -> None:
    found = figures(values)
    assert (
        min(values) - 1e-4
        <= found["p10"]
        <= found["median"]
        <= found["p90"]
        <= found["p99"]
        <= max(values) + 1e-4
    )
    assert found["n"] == len(values)


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


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_take_another_number_of_layers(name: str) -> None:
    assert shape(name, 2).num_layers == 2 and shape(name) == SHAPES[name]


def test_documents_are_the_same_for_a_seed_and_fill_their_packs() -> None:
    one, two = (
        draw_batches(Capacity(128, 16), 12, 300, mean=40, sigma=1.0, seed=3) for _ in range(2)
    )
    assert len(one) == 12 and all(
        torch.equal(a.data, b.data) for a, b in zip(one, two, strict=True)
    )
    assert sum(batch.num_tokens for batch in one) > 0.9 * 12 * 128
    assert len({batch.lengths for batch in one}) > 6


def test_compiled_layers_share_one_graph_and_compute_what_the_model_does() -> None:
    model, counter = DecoderModel(shape("tiny", 10), device=CPU), CompileCounter()
    (batch,) = draw_batches(Capacity(32, 4), 1, 300, mean=10, sigma=0.5, seed=0)
    results = []
    for module in (model, compiled_stack(model, backend=counter)):
        model.zero_grad()
        with room_for_code():
            loss = module(batch)
        loss.backward()
        results.append([loss, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.compiler.reset()
    assert counter.frame_count == 3, (
        "embedding, a layer, head: not compiled again for another layer"
    )
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--pp", "2"], "but 1 were started"),
        (["--chunks", "2"], "would send to itself"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["pipeline", "--device", "cpu", *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""


def test_bench_without_a_name_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "python benchmarks/bench.py moe" in printed and "pipeline" in printed


def test_bench_pipeline_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "pipeline",
        *SMALL,
        "--ways",
        "eager",
        "chunk",
        "--rounds",
        "2",
        "--together",
        "2",
    ]
    assert main(words) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["way"] for row in rows] == ["eager", "chunk"]
    assert all(row["bubble_share"] == 0.0 and row["reason"] is None for row in rows)


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


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.dist
def test_a_way_that_one_rank_cannot_run_is_left_out_by_all() -> None:
    chosen = options(chunks=2, ways=("layer", "chunk", "step"))
    for rows in run_ranks(measured, 2, chosen, "chunk", layout=Layout(pp=2)):
        assert [row["way"] for row in rows] == ["layer", "chunk", "step"]
        assert rows[0]["reason"] is None and rows[0]["figures"]["step_ms"]["n"] == 2
        assert rows[1]["reason"] == "rank 1: RuntimeError: no room"
        assert "need CUDA" in rows[2]["reason"]


def test_a_failure_within_a_step_ends_the_run_after_writing_all_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step, calls = PipelineWay.step, []

    def sometimes(self: PipelineWay, *arguments: Any) -> Any:
        calls.append(self.name)
        if self.name == "chunk" and calls.count("chunk") == 5:
            raise RuntimeError("lost the device")
        return step(self, *arguments)

    rows = Rows(facts(CPU, "abc123"))
    with (
        mock.patch.object(PipelineWay, "step", sometimes),
        pytest.raises(RuntimeError, match="lost the device"),
    ):
        measure_pipeline(
            options(pp=1, ways=("eager", "chunk"), rounds=3),
            CPU,
            make_links(single_process()),
            rows,
            Deadline(None),
        )
    eager, chunk = rows_of(capsys.readouterr().out)
    assert eager["figures"]["step_ms"]["n"] == 1 and eager["reason"] is None, (
        "the second round begins with chunk"
    )
    assert chunk["reason"] == "rank 0: RuntimeError: lost the device"


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
