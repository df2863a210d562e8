"""A run whose files were damaged goes on from what is whole, and says so."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import equal, ran, state_of, tiny, trainer

from packgraph import cli
from packgraph.train.checkpoint.background import Saves
from packgraph.train.checkpoint.state_file import CheckpointError, read_state
from packgraph.train.checkpoint.writer import write_state
from packgraph.train.config.reading import ConfigError, to_dict
from packgraph.train.config.stored import stored_config
from packgraph.train.metrics import METRICS, MetricsLog, read_metrics
from packgraph.train.run_files import CHECKPOINTS, CONFIG, SUMMARY, read_json, write_json
from packgraph.train.run_folder import check_same_run
from packgraph.train.trainer import Trainer

CONFIGURATION = tiny(steps=6, checkpoint_every=2)


def flip(path: Path, bit: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    bit = 4 * len(content) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def go(folder: Path, steps: int, resume: bool) -> dict[str, torch.Tensor]:
    return state_of(ran(folder, tiny(steps=steps, checkpoint_every=2), resume=resume)[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of six steps and its state, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, go(folder, 6, False)


@pytest.fixture
def folder(whole: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp"])
def test_a_resume_falls_back_to_the_newest_whole_checkpoint_and_says_so(
    tmp_path: Path, folder: Path, whole: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    flip(folder / CHECKPOINTS / "step-00000006" / name)
    equal(go(folder, 6, True), whole[1])
    said = " ".join((tmp_path / "log").read_text().split())
    assert f"step-00000006/{name}" in said.replace(" ", "") or name in said
    assert "resumed from" in said and "step-00000004" in said
    assert [row["step"] for row in read_metrics(folder / METRICS)] == [1, 2, 3, 4, 5, 6]


def test_a_state_without_its_parts_is_passed_over(folder: Path) -> None:
    path = folder / CHECKPOINTS / "step-00000006" / "state.json"
    content = json.loads(path.read_text())
    del content["checksum"], content["state"]["data"]
    write_state(path, content)
    run = trainer(folder, CONFIGURATION)
    run.resume()
    assert run.step == 4


def test_nothing_whole_is_an_error(folder: Path) -> None:
    for path in (folder / CHECKPOINTS).glob("step-*/state.json"):
        flip(path)
    with pytest.raises(CheckpointError, match="no other checkpoint"):
        trainer(folder, CONFIGURATION).resume()


def test_the_configuration_is_in_the_checkpoint(folder: Path) -> None:
    _, state, _ = read_state(folder / CHECKPOINTS / "step-00000006")
    assert state["config"] == json.loads(json.dumps(to_dict(CONFIGURATION)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", None])
def test_a_damaged_config_comes_from_the_newest_checkpoint(
    folder: Path, content: bytes | None
) -> None:
    whole = read_json(folder / CONFIG)
    (folder / CONFIG).unlink()
    if content is not None:
        (folder / CONFIG).write_bytes(content)
    flip(folder / CHECKPOINTS / "step-00000006" / "state.json")
    (note,) = check_same_run(folder, CONFIGURATION)
    assert "config.json" in note and "step-00000004" in note
    assert stored_config(folder)[0].values == whole
    go(folder, 8, True)
    assert read_json(folder / CONFIG)["run"]["steps"] == 8


def test_a_config_that_nothing_can_replace_is_a_clear_error(tmp_path: Path) -> None:
    write_json(tmp_path / CONFIG, to_dict(CONFIGURATION))
    flip(tmp_path / CONFIG, 8 * (tmp_path / CONFIG).read_text().index("eps") + 1)
    with pytest.raises(ConfigError, match=r"config\.json: damaged or edited.*checksum"):
        check_same_run(tmp_path, CONFIGURATION)


def test_no_flipped_bit_of_the_config_changes_the_run(folder: Path) -> None:
    original, expected = (folder / CONFIG).read_bytes(), stored_config(folder)[0].values
    for bit in random.Random(1).sample(range(8 * len(original)), 400):
        (folder / CONFIG).write_bytes(original)
        flip(folder / CONFIG, bit)
        assert stored_config(folder)[0].values == expected


def test_a_damaged_summary_is_made_anew(folder: Path) -> None:
    text = (folder / SUMMARY).read_text()
    (folder / SUMMARY).write_text(text.replace('"loss_first": ', '"loss_first": 1'))
    assert read_json(folder / SUMMARY) == {}


def test_what_a_resume_reads_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log = MetricsLog(tmp_path, last_step=0)
    synced.clear()
    log.sync()
    assert synced == {METRICS}
    synced.clear()
    log.close()
    assert METRICS in synced
    write_json(tmp_path / SUMMARY, {"steps": 1})
    assert {"summary.tmp", tmp_path.name} <= synced


def test_metrics_are_synced_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, write = MetricsLog.sync, Saves.write

    def written(*args: Any, **options: Any) -> None:
        events.append("save")
        write(*args, **options)

    monkeypatch.setattr(MetricsLog, "sync", lambda log: (events.append("sync"), sync(log))[1])
    monkeypatch.setattr(Saves, "write", written)
    go(tmp_path / "run", 4, False)
    assert events[:4] == ["sync", "save", "sync", "save"]


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.0,
        "tokens": 80,
        "places": 100,
        "seconds": 0.5,
        "starting": step == 1,
    }


@pytest.mark.parametrize(
    "bad",
    [
        "[1]",
        "3",
        "{}",
        '{"step": 3, "lo',
        '{"step": "3", "loss": 2}',
        "\x00\x00",
        "",
        "[" * 100_000,
    ],
)
def test_a_damaged_row_of_metrics_keeps_the_others(tmp_path: Path, bad: str) -> None:
    lines = [json.dumps(row(1)), json.dumps(row(2)), bad, json.dumps(row(4))]
    (tmp_path / METRICS).write_text("\n".join(lines) + "\n")
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [1, 2, 4]
    log = MetricsLog(tmp_path, last_step=4)
    assert log.damaged == [3]
    log.write(row(5))
    log.close()
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS)] == [1, 2, 4, 5]


def test_the_line_that_a_kill_cut_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2))[:20])
    log = MetricsLog(tmp_path, last_step=2)
    log.close()
    assert log.damaged == [] and [entry["step"] for entry in log.rows] == [1]


SMALL = [
    "--model.num-layers",
    "1",
    "--model.hidden-size",
    "16",
    "--model.num-heads",
    "2",
    "--model.num-kv-heads",
    "1",
    "--model.head-dim",
    "8",
    "--model.intermediate-size",
    "32",
    "--run.tokens-per-step",
    "64",
    "--run.device",
    "cpu",
    "--graph.enabled",
    "no",
    "--graph.capacities",
    "64x8",
]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    draw = random.Random(0)
    (tmp_path / "data.jsonl").write_text(
        "\n".join(
            json.dumps({"text": "".join(draw.choices("abcdef ", k=draw.randint(5, 50)))})
            for _ in range(40)
        )
        + "\n"
    )
    return [
        "--data.source",
        "jsonl",
        "--data.path",
        str(tmp_path / "data.jsonl"),
        "--run.folder",
        str(tmp_path / "runs"),
    ]


def test_the_command_goes_on_with_damaged_files_and_cleans_up(
    tmp_path: Path, data: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "qwen3-tiny",
        *SMALL,
        *data,
        "--run.name",
        "mine",
        "--run.checkpoint-every",
        "2",
    ]
    assert cli.main([*words, "--run.steps", "4"]) == 0
    folder = tmp_path / "runs" / "mine"
    checkpoints = folder / CHECKPOINTS
    flip(checkpoints / "step-00000004" / "__0_0.distcp")
    (folder / CONFIG).write_bytes(b"")
    with (folder / METRICS).open("a") as stream:
        stream.write("rubbish\n")
    for name in (".writing-step-00000006", ".replaced-step-00000002"):
        (checkpoints / name).mkdir()
    (folder / "shared-0123.tmp").write_text("")
    capsys.readouterr()
    assert (
        cli.main(["train", "--config", str(folder / CONFIG), "--resume", "--run.steps", "3"]) == 0
    )
    text = " ".join(capsys.readouterr().err.split())
    for said in (
        "step-00000004/__0_0.distcp: damaged",
        "resumed from",
        "step-00000002",
        "metrics.jsonl",
        "config.json",
    ):
        assert said in text, said
    assert not list(checkpoints.glob(".*")) and not list(folder.glob("*.tmp"))
    assert (checkpoints / "latest").read_text() == "step-00000003\n"


def test_leftovers_go_before_the_first_save(
    tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "qwen3-tiny", *SMALL, *data, "--run.name", "mine", "--run.steps"]
    assert cli.main([*words, "2"]) == 0
    checkpoints = tmp_path / "runs" / "mine" / CHECKPOINTS
    (checkpoints / ".writing-step-00000006").mkdir()
    seen: list[list[Path]] = []
    real = Trainer.resume
    monkeypatch.setattr(
        Trainer, "resume", lambda run: (seen.append(list(checkpoints.glob(".*"))), real(run))[1]
    )
    assert cli.main([*words, "3", "--resume"]) == 0
    assert seen == [[]]
