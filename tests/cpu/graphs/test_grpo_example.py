"""The loop of reinforcement learning learns, and does as it does without graphs."""

import runpy
from pathlib import Path

PROGRAM = Path(__file__).parents[3] / "examples" / "grpo_loop.py"


def run(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", [str(PROGRAM), *options])
    return runpy.run_path(str(PROGRAM))["main"]()


def test_rollouts_and_updates_by_graphs_equal_those_without(monkeypatch, capsys):
    found = run(monkeypatch, "--steps", "16")
    said = capsys.readouterr().out
    assert "'warm-up': 2})" in said and "replayed=110" in said, said
    assert found[-1][1] > 0.6 > 0.4 > found[0][1]
    assert run(monkeypatch, "--steps", "16", "--eager") == found
    assert "replayed=0" in capsys.readouterr().out
