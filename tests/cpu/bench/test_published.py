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
)
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


@pytest.mark.slow
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
