"""What verify says of a run that takes long: where it is, not often, and nothing of a quick one."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from verifykit import one_capacity, packs_of_one

from packgraph import cli
from packgraph.train import progress
from packgraph.train.progress import SILENT, Phases
from packgraph.verification.matrix import tiny_config
from packgraph.verification.verify import verify, verify_sequential

CPU = torch.device("cpu")


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def said(phase: str, seconds: list[float], total: int | None = None) -> list[str]:
    """The lines of a phase whose steps take so many seconds."""
    clock, lines = Clock(), list[str]()
    progress = Phases(lines.append, clock)
    for step in progress.of(phase, len(seconds) if total is None else total, range(len(seconds))):
        clock.seconds += seconds[step]
    return lines


def test_a_phase_says_where_it_is_every_ten_seconds_and_how_long_it_took() -> None:
    assert said("eager run", [4.0] * 9) == [
        "eager run: step 3 of 9, 0:00:12, ETA 0:00:24",
        "eager run: step 6 of 9, 0:00:24, ETA 0:00:12",
        "eager run: 9 steps in 0:00:36",
    ]
    assert said("", [10.5, 2.0]) == ["step 1 of 2, 0:00:10, ETA 0:00:10", "2 steps in 0:00:12"]


def test_quick_phases_are_silent() -> None:
    assert said("graph run", [0.09] * 100) == [] == said("graph run", [])
    assert said("graph run", [5.1, 5.0]) == ["graph run: 2 steps in 0:00:10"]


def test_a_step_that_takes_long_is_told_once_it_is_made() -> None:
    assert said("", [61.0, 1.0, 1.0]) == [
        "step 1 of 3, 0:01:01, ETA 0:02:02",
        "3 steps in 0:01:03",
    ]
    assert said("", [61.0]) == ["1 step in 0:01:01"]


def test_a_phase_that_ends_early_says_how_many_steps_it_had() -> None:
    assert said("eager run", [6.0] * 3, total=50) == [
        "eager run: step 2 of 50, 0:00:12, ETA 0:04:48",
        "eager run: 3 steps in 0:00:18",
    ]


def test_a_phase_that_is_left_has_not_ended() -> None:
    clock, lines = Clock(), list[str]()
    steps = Phases(lines.append, clock).of("eager run", 5, range(5))
    next(steps)
    clock.seconds += 60.0
    steps.close()  # type: ignore[attr-defined]
    assert lines == []


def test_the_runs_in_lockstep_are_one_phase_and_those_apart_are_two() -> None:
    lines: list[str] = []
    often, config = (
        Phases(lines.append, Clock(), every=0.0),
        one_capacity(tiny_config("chunk", 0.0, 3)),
    )
    together = verify("run", config, packs_of_one(), CPU, progress=often)
    texts = [f"step {step} of 3, 0:00:00, ETA 0:00:00" for step in (1, 2)] + ["3 steps in 0:00:00"]
    assert lines == [f"run: {text}" for text in texts]
    lines.clear()
    apart = verify_sequential("run", config, packs_of_one, CPU, progress=often)
    assert lines == [f"{phase}: {text}" for phase in ("eager run", "graph run") for text in texts]
    assert together.good and together == apart == verify(
        "run", config, packs_of_one(), CPU, progress=SILENT
    )


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": "to be or not to be " * (1 + row % 3)}) + "\n" for row in range(40)
        )
    )
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
    ]


@pytest.mark.parametrize(
    ("more", "phase"),
    [([], "qwen3-tiny: "), (["--apart"], "graph run: ")],
    ids=["lockstep", "apart"],
)
def test_the_command_says_it_on_stderr(
    words: list[str],
    more: list[str],
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "Phases", partial(Phases, now=Clock()))
    assert cli.main([*words, *more]) == 0
    quick = capsys.readouterr()
    assert " of 4, " not in quick.err and " steps in " not in quick.err
    monkeypatch.setattr(progress, "Phases", partial(Phases, now=Clock(), every=0.0))
    assert cli.main([*words, *more]) == 0
    told = capsys.readouterr()
    assert told.out == quick.out and "sizes of rows" in told.out
    assert f"{phase}step 3 of 4, 0:00:00, ETA 0:00:00\n" in told.err
    assert f"{phase}4 steps in 0:00:00\n" in told.err
