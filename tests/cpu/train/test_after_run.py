"""The end of a run: which steps the losses are means of, and commands that work as they stand."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from packgraph import cli
from packgraph.parallel.ranks import Launch
from packgraph.train.config.presets import preset
from packgraph.train.launch import closing_lines, next_commands
from packgraph.train.metrics import summarize

TINY = preset("qwen3-tiny")
ENDED = {"ended": "all steps done", "steps": 7, "replayed": 3, "fallbacks": {}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "checkpoints" / "step-00000007").mkdir(parents=True)
    return tmp_path / "mine"


def row(step: int, **more: Any) -> dict[str, Any]:
    fixed = {"tokens": 10, "places": 20, "seconds": 1.0, "starting": False}
    return {"step": step, "loss": float(step), **fixed, **more}


def test_losses_say_which_steps_they_are_means_of(folder: Path) -> None:
    def loss_line(rows: list[dict[str, Any]], **more: Any) -> str:
        return closing_lines(TINY, folder, summarize(rows) | ENDED | more, Launch())[1]

    assert loss_line([row(1), row(2)]).startswith("loss 1.0000 (step 1) → 2.0000 (step 2), ")
    many = [row(step) for step in range(1, 101)]
    whole = "loss 5.5000 (mean of steps 1 to 10) → 95.5000 (mean of steps 91 to 100), "
    assert loss_line(many).startswith(whole)
    many[94]["skipped"] = True
    assert "→ 95.0000 (mean of 10 of the steps 90 to 100), " in loss_line(many)
    many[94]["loss"] = None
    assert "→ 95.0000 (mean of 10 of the steps 90 to 100), " in loss_line(many)
    assert loss_line(many, loss_first_steps=None).startswith("loss 5.5000 → 95.0000 (mean of 10")


def test_a_run_can_go_on_as_it_ended(folder: Path) -> None:
    def words(**more: Any) -> list[str] | None:
        return next_commands(TINY, folder, ENDED | more, Launch()).get("to go on")

    assert words() == [*words(ended="stopped by SIGTERM"), "--run.steps", "14"]
    assert words(ended="stopped by SIGTERM")[-2:] == [str(folder / "config.json"), "--resume"]
    assert words(ended="the data ended") is None


def test_nothing_is_said_of_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    assert set(next_commands(TINY, folder, ENDED, Launch())) == {
        "to go on",
        "Hugging Face weights",
    }
    (folder / "tensorboard").mkdir()
    assert "curves" not in next_commands(TINY, folder, ENDED, Launch())
    (folder / "tensorboard" / "events").write_bytes(b"")
    assert "curves" in next_commands(TINY, folder, ENDED, Launch())
    (folder / "weights-step-7").mkdir()
    assert "Hugging Face weights" not in next_commands(TINY, folder, ENDED, Launch())
    assert next_commands(TINY, tmp_path / "empty", ENDED, Launch()) == {}
    model = dataclasses.replace(
        TINY.model, attention_bias=not TINY.model.attention_bias, qk_norm=False
    )
    assert next_commands(
        dataclasses.replace(TINY, model=model), folder, ENDED | {"steps": 8}, Launch()
    ).keys() == {"to go on", "curves"}


def test_ranks_are_started_again_by_torchrun(folder: Path) -> None:
    def text(launch: Launch) -> str:
        return " ".join(next_commands(TINY, folder, ENDED, launch)["to go on"])

    two = text(Launch(world=2, local_world=2))
    assert re.search(r"torch\S* --nproc-per-node 2 -m packgraph.cli train --config ", two)
    assert " ... -m packgraph.cli train " in text(Launch(world=4, local_world=2))
    assert "torchrun" not in text(Launch())
    one = next_commands(TINY, folder, ENDED, Launch(world=2, local_world=2))
    assert not {"torchrun", "--nproc-per-node"} & set(one["Hugging Face weights"])


def test_commands_are_those_of_this_python(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> list[str]:
        words = next_commands(TINY, folder, ENDED, Launch())["to go on"]
        return words[: words.index("train")]

    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.chdir(tmp_path)
    assert begin() == ["PYTHONPATH=src", sys.executable, "-m", "packgraph.cli"]
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "packgraph"
    script.write_text("")
    script.chmod(0o755)
    assert begin() == ["bin/packgraph"]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert begin() == ["packgraph"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_says_it(
    rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packgraph.train.launch.train", lambda *given: (folder, ENDED))
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["train", "qwen3-tiny"]) == 0
    assert ("to go on: " in capsys.readouterr().err) == (rank == 0)
