"""Settings of others: every one is a run that the trainer takes, and its figures are counted as
said."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from published import (
    SETTINGS,
    lengths_of,
    main,
    operations_per_token,
    run_config,
    tiny,
    with_ratios,
    write_data,
)
from published_settings import LLAMA3_8B, Setting
from table import tables

from packgraph.ops.kernels import HAS_TRITON
from packgraph.train.config.sections import DataConfig
from packgraph.train.validate import validate

DATA = DataConfig(source="jsonl", path="documents.jsonl", tokenizer="tokenizer.json")
ALL = [(name, world) for name, setting in SETTINGS.items() for world in setting.gpus]


@pytest.mark.parametrize(("name", "world"), ALL)
def test_the_trainer_takes_every_setting(name: str, world: int) -> None:
    for made, device in ((SETTINGS[name], "cuda"), (tiny(SETTINGS[name]), "cpu")):
        if not HAS_TRITON:  # which kernels of the symmetric dispatcher are written in
            made = replace(made, dispatcher="auto")
        config = run_config(made.on(world), world, Path("runs"), DATA)
        assert validate(config, device, made.model.vocab_size, world) == []
        assert max(lengths_of(made)) <= max(row.bound for row in made.capacities)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_every_gpu_has_all_its_rows(world: int) -> None:
    """Rows that are full: a step takes packs until it has its tokens."""
    rows = SETTINGS["llama3.1-8b"]
    assert -(-rows.tokens_per_step(world) // rows.tokens) == world * rows.microbatches


def test_every_figure_of_others_has_a_source() -> None:
    for name, setting in SETTINGS.items():
        theirs = setting.theirs
        assert setting.over is None or SETTINGS[setting.over].documents == setting.documents
        if theirs is None:
            continue
        assert re.fullmatch(r"[\w.-]+/[\w.-]+, .+", theirs.source), name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|undated", theirs.date), name
        assert (theirs.unit == "times padded") == (setting.over is not None), name


def test_operations_are_six_for_a_weight_and_four_for_a_frozen_one() -> None:
    rows, length = SETTINGS["llama3.1-8b"], 8192
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 4096 * 128_256
    attention = 6 * 32 * 4096 * (length + 1)  # causal pairs of a token, forward and backward
    assert operations_per_token(rows, [length, length]) == 6 * weights + attention
    adapters = replace(rows, lora_rank=16)
    assert operations_per_token(adapters, [length]) == 4 * weights + attention


def test_data_are_the_documents_of_the_setting(tmp_path: Path) -> None:
    data = write_data(tmp_path, [3, 5], 7)
    rows = [json.loads(line)["input_ids"] for line in Path(str(data.path)).read_text().splitlines()]
    assert [len(row) for row in rows] == [3, 5] and max(map(max, rows)) < 7
    lengths = lengths_of(SETTINGS["halo-packed"])
    assert 0.9 < sum(lengths) / len(lengths) / 1024 < 1.1
    assert set(lengths_of(SETTINGS["qwen3-0.6b-8k"])) == {8192}


def test_data_that_a_run_has_opened_stay(tmp_path: Path) -> None:
    """Ranks write the same data, some when others have begun to read."""
    first = write_data(tmp_path, [3, 5], 7)
    opened = [Path(str(path)).stat().st_ino for path in (first.path, first.tokenizer)]
    assert write_data(tmp_path, [3, 5], 7) == first
    assert [Path(str(path)).stat().st_ino for path in (first.path, first.tokenizer)] == opened
    assert len(list(tmp_path.iterdir())) == 2


def test_batches_are_padded_little_beyond_their_longest_document() -> None:
    """Else a ratio over them is of the shapes that there are."""
    setting = SETTINGS["unsloth-padded"]
    lengths, bounds = lengths_of(setting), [row.bound for row in setting.capacities]
    longest = [max(lengths[start : start + 8]) for start in range(0, len(lengths), 8)]
    padded = [min(bound for bound in bounds if bound >= most) for most in longest]
    assert sum(padded) < 1.12 * sum(longest)


def test_a_padded_and_a_packed_run_of_toys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    names = ["halo-padded", "halo-packed"]
    for name in names:  # in calls of their own, as each setting has a process
        assert main(["--tiny", "--only", name, "--out", str(out), "--commit", "abc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["way"] for row in rows] == names and all(row["replayed"] > 0 for row in rows)
    assert rows[0]["padding"] > 0.5 > rows[1]["padding"]
    times = rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"]
    assert (
        f"{times:.2f} times padded | theirs 9.22 times padded, 2 × B300 (whitecircle/halo, undated)"
        in lines[1]
    )
    assert [row["times_padded"] for row in with_ratios(rows)] == [None, times]
    text = tables(rows, "published")
    assert f"| {times / 9.22:.2f} | abc |" in text and "whitecircle/halo" in text


def test_a_setting_that_fails_has_a_row_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr("published.tiny", lambda setting: replace(setting, recompute="nothing"))
    assert main(["--tiny", "--only", "qwen3-0.6b-8k", "--out", str(out)]) == 1
    assert "'nothing'" in json.loads(out.read_text())["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "gpt"], "no setting is called gpt"),
        (["--only", "llama3.1-8b"], "llama3.1-8b: not for 1 GPUs"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SETTINGS)


def test_fewer_layers_are_those_of_the_number_of_gpus() -> None:
    setting = Setting(
        model=LLAMA3_8B,
        documents=SETTINGS["llama3.1-8b"].documents,
        capacities=SETTINGS["llama3.1-8b"].capacities,
        gpus={1: 8, 2: 0},
    )
    assert [setting.on(world).model.num_layers for world in (1, 2)] == [8, 32]
    with pytest.raises(KeyError):
        setting.on(4)
