"""Stored rows hold or do not: time and memory of the same device, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench import main
from golden import Golden

SMALL = ["--model", "tiny", "--layers", "1", "--tokens", "32", "--mean", "12", "--rounds", "1"]


def row(**more: Any) -> dict[str, Any]:
    """A row of bench step, ms and bytes of peak memory as given."""
    ms, peak = more.pop("ms", 10.0), more.pop("peak", 2**30)
    return {
        "benchmark": "step",
        "way": "chunk",
        "model": "tiny",
        "tokens": 1024,
        "reason": None,
        "device": "one",
        "commit": "abc",
        "versions": {"torch": "2.11.0"},
        "peak_bytes": peak,
        "figures": {"device_ms": {"median": ms}, "host_ms": {"median": 99.0}},
    } | more


def stored(folder: Path, *rows: dict[str, Any]) -> Golden:
    path = folder / "golden.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return Golden(path)


@pytest.mark.parametrize(
    ("now", "holds"),
    [
        ({}, True),
        ({"ms": 10.4}, True),
        ({"ms": 5.0, "peak": 2**29}, True),
        ({"ms": 10.6}, False),
        ({"peak": int(1.06 * 2**30)}, False),
        ({"peak": [2**29, int(1.06 * 2**30)]}, False),
        ({"reason": "RuntimeError: out of memory", "figures": {}, "peak_bytes": None}, False),
    ],
)
def test_more_than_five_percent_of_time_or_memory_does_not_hold(
    now: dict[str, Any], holds: bool, tmp_path: Path
) -> None:
    lines, held = stored(tmp_path, row()).compare([row(**now)])
    assert held == holds and ("worse" in lines[-1]) != holds
    assert "stored at abc with torch 2.11.0" in lines[0]


def test_the_command_fails_where_a_stored_row_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a row of its own, made slower and faster by hand: times of a CPU vary."""
    out, path = tmp_path / "rows.jsonl", tmp_path / "golden.jsonl"
    words = ["step", *SMALL, "--ways", "eager", "--calls", "1"]
    assert main([*words, "--out", str(out)]) == 0
    made = json.loads(out.read_text())
    for factor, code in ((1000.0, 0), (0.001, 1)):
        for figure in made["figures"].values():
            figure["median"] *= factor
        path.write_text(json.dumps(made) + "\n")
        assert main([*words, "--golden", str(path)]) == code
        assert ("worse by more than 5%" in capsys.readouterr().err) == bool(code)
        made = json.loads(out.read_text())
    assert main([*words, "--golden", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
