"""Verify with one run in memory at a time finds what the lockstep comparison finds."""

import json
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from verifykit import BROKEN, break_gradient, break_random_state, one_capacity, packs_of_one

from packgraph import cli
from packgraph.train.config.presets import preset
from packgraph.train.config.sections import ParallelConfig, TrainConfig
from packgraph.train.features.moe import ExpertBalance, Overflow
from packgraph.train.strategies import Executor
from packgraph.verification import compared_run as side
from packgraph.verification import verify as apart
from packgraph.verification.command import verify_problems
from packgraph.verification.compare import DIFFERS
from packgraph.verification.matrix import budget_of, random_packs, tiny_config, tiny_experts_config
from packgraph.verification.verify import SequentialRuns, VerifyReport, verify, verify_sequential

CPU = torch.device("cpu")


def granular(granularity: str, *, optimizer: bool = False, steps: int = 3) -> TrainConfig:
    config = tiny_config("chunk", 0.1, steps)
    return replace(
        config,
        graph=replace(config.graph, granularity=granularity, optimizer=optimizer, strict=True),
    )


def with_stash(steps: int) -> TrainConfig:
    """Experts whose stash has pages for a balanced load only, of one capacity."""
    config = one_capacity(tiny_experts_config("chunk", 0.1, steps))
    return replace(config, parallel=ParallelConfig(expert_stash=1.0))


def both(config: TrainConfig) -> tuple[VerifyReport, VerifyReport]:
    """The reports of the runs in lockstep, and of the runs one after the other."""
    packs = partial(random_packs, 1) if len(config.graph.capacities) > 1 else packs_of_one
    return (
        verify("run", config, packs(), CPU, budget=budget_of),
        verify_sequential("run", config, packs, CPU, budget=budget_of),
    )


@pytest.mark.parametrize(
    "config",
    [
        granular("layer"),
        pytest.param(granular("chunk"), marks=pytest.mark.slow),
        pytest.param(granular("step"), marks=pytest.mark.slow),
        granular("step", optimizer=True),
    ],
    ids=["layer", "chunk", "step", "update"],
)
@pytest.mark.few(4)
def test_right_runs_have_the_report_of_the_lockstep(config: TrainConfig) -> None:
    lockstep, apart = both(config)
    assert lockstep == apart and apart.good and apart.steps == 3 and apart.microbatches > 3


def test_steps_that_are_made_again_have_the_report_of_the_lockstep() -> None:
    lockstep, apart = both(with_stash(steps=4))
    assert lockstep == apart and apart.good and apart.made_again > 0


@pytest.mark.slow
def test_graphs_are_gone_before_there_is_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the old memory; near the limit of a device both do not fit."""
    events, free, room = [], Executor.free_graphs, Overflow.make_room
    monkeypatch.setattr(
        Executor, "free_graphs", lambda self, bucket: (events.append("free"), free(self, bucket))[1]
    )
    monkeypatch.setattr(
        Overflow, "make_room", lambda self, *args: (events.append("room"), room(self, *args))[1]
    )
    report = verify_sequential("run", with_stash(steps=4), packs_of_one, CPU, budget=budget_of)
    assert report.made_again > 0
    before = ["", *events]
    assert all(before[place] == "free" for place, event in enumerate(events) if event == "room")


@pytest.mark.parametrize(
    "config",
    [one_capacity(granular("chunk", steps=3)), with_stash(steps=3)],
    ids=["dense", "experts"],
)
@pytest.mark.few(2)
def test_the_eager_run_is_gone_when_the_graph_run_is_made(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, made, alive = side.make_optimizer, [], []
    free = mock.Mock(side_effect=apart.free_memory)
    monkeypatch.setattr(apart, "free_memory", free)

    def make(*args: Any, **options: Any) -> Any:
        alive.append([reference() is not None for reference in made])
        assert free.call_count == len(alive), "also of what refers to itself"
        optimizer = original(*args, **options)
        made.extend(
            weakref.ref(tensor)
            for tensor in [
                *optimizer.state_tensors().values(),
                *(span.parameters for span in optimizer.flat.spans),
            ]
        )
        return optimizer

    monkeypatch.setattr(side, "make_optimizer", make)
    assert verify_sequential("run", config, packs_of_one, CPU).good
    first, second = alive
    assert first == [] and second and not any(second)


@pytest.mark.slow
def test_one_eager_run_is_enough_for_many_graph_runs() -> None:
    runs = SequentialRuns(packs_of_one, CPU, in_flight=lambda step: False, budget=budget_of)
    expected = runs.eager_run(one_capacity(granular("layer", steps=3)))
    for name in ("layer", "chunk", "step"):
        report = runs.graph_run(name, one_capacity(granular(name, steps=3)), expected)
        assert report.good and report.title == name and report.steps == 3, name
    faster = one_capacity(granular("chunk", steps=3))
    faster = replace(
        faster,
        optimizer=replace(faster.optimizer, learning_rate=2 * faster.optimizer.learning_rate),
    )
    assert runs.graph_run("another training", faster, expected).differences["parameters"].step == 1


def places(report: VerifyReport) -> dict[str, tuple[int, str]]:
    return {
        kind: (difference.step, difference.name) for kind, difference in report.differences.items()
    }


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_config("layer", 0.0, 4), marks=pytest.mark.slow),
        one_capacity(granular("chunk")),
    ],
    ids=["layer", "chunk"],
)
def test_a_broken_gradient_is_named_by_step_kind_and_tensor(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_gradient(monkeypatch)
    lockstep, apart = both(config)
    assert not apart.good and places(lockstep) == places(apart)
    assert str(apart.differences["gradients"]) == f"step 3: {BROKEN}: {DIFFERS}"
    assert apart.differences["parameters"].step == 3 and "random states" not in apart.differences


@pytest.mark.slow
def test_a_random_state_that_graphs_move_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_random_state(monkeypatch)
    config = one_capacity(tiny_config("chunk", 0.0, 3))
    report = verify_sequential("broken", config, packs_of_one, CPU)
    assert places(report) == {"random states": (3, "cpu")}


def test_a_buffer_that_one_run_leaves_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth update of all, which is the first one of the graph run, moves no bias of a
    router."""
    original, calls = ExpertBalance.update, []

    def update(self: ExpertBalance, skip: Any = None) -> None:
        calls.append(None)
        if len(calls) != 4:
            original(self, skip)

    monkeypatch.setattr(ExpertBalance, "update", update)
    config = one_capacity(tiny_experts_config("layer", 0.0, 3))
    report = verify_sequential("biases", config, packs_of_one, CPU)
    assert places(report)["parameters"] == (1, "layers.1.mlp.gate.e_score_correction_bias")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "data.jsonl"
    rows = [{"text": "to be or not to be " * (1 + index % 3)} for index in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "verify",
        "qwen3-tiny",
        "--data.source",
        "jsonl",
        "--data.path",
        str(path),
        "--model.hidden-size",
        "16",
        "--model.intermediate-size",
        "32",
        "--model.num-layers",
        "1",
        "--graph.capacities",
        "32x4,64x8",
        "--run.tokens-per-step",
        "100",
        "--run.device",
        "cpu",
        "--steps",
        "4",
        "--apart",
    ]


@pytest.mark.slow
def test_the_command_ends_with_zero_or_one(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    assert "1 of 1 runs bitwise equal" in capsys.readouterr().out
    break_gradient(monkeypatch)
    assert cli.main(words) == 1
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"step 3: {BROKEN}: its bits differ" in text and "0 of 1 runs bitwise equal" in text


def test_what_would_hold_two_models_after_all_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--apart"]) == 2
    assert "--apart: is for a model of which two do not fit" in capsys.readouterr().err
    assert cli.main(["train", "qwen3-tiny", "--apart"]) == 2
    assert (
        "--apart: is no option of `packgraph train`, but of `packgraph verify`"
        in capsys.readouterr().err
    )
    config = preset("qwen3-tiny")
    assert not verify_problems(config, None, 2, one_process=False, apart=True)
    assert not verify_problems(config, None, 1, one_process=True, apart=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["verify", "qwen3-tiny", "--apart"]) == 2
    assert "add --skip-one-process" in capsys.readouterr().err
