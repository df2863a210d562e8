"""The examples run, and train."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the integration is of this library")

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_own_loop(monkeypatch, capsys, tmp_path):
    program = EXAMPLES / "huggingface_loop.py"
    options = ["--steps", "12", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", [str(program), *options])
    losses = runpy.run_path(str(program))["main"]()
    assert losses[-1] < losses[0] - 1
    said = capsys.readouterr().out
    assert "replayed=22" in said and re.search(r"fallbacks=.*'warm-up': 2}", said), said
    assert (tmp_path / "run" / "model.safetensors").exists()
