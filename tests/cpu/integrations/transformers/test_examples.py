"""The examples run, and train as they do without graphs."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the integration is of this library")

EXAMPLES = Path(__file__).parents[4] / "examples"
# What each needs besides transformers, and how many calls two steps of warm-up leave to replays;
# hf_trainer evaluates ten rows too.
LOOPS = {
    "accelerate_loop": ("accelerate", ["--steps", "10"], 8),
    "hf_trainer": ("accelerate", ["--steps", "10"], 31 + 10),
    "trl_sft": ("trl", ["--steps", "10"], 18),
    "fabric_loop": ("lightning_fabric", ["--steps", "10"], 8),
    "peft_lora": ("peft", ["--steps", "6"], 10),
}


def run(monkeypatch, name, *options):
    program = EXAMPLES / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(program), *options])
    return runpy.run_path(str(program))["main"]()


def test_own_loop(monkeypatch, capsys, tmp_path):
    losses = run(monkeypatch, "huggingface_loop", "--steps", "12", "--out", str(tmp_path / "run"))
    assert losses[-1] < losses[0] - 1
    said = capsys.readouterr().out
    assert re.search(r"replayed +22  calls\neager +2  warm-up", said), said
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.few(5)
def test_loops_of_others_equal_themselves_without_graphs(name, monkeypatch, capsys, one_process):
    library, options, replays = LOOPS[name]
    pytest.importorskip(library, reason="the example is of this library")
    losses = run(monkeypatch, name, *options)
    said = capsys.readouterr().out
    assert re.search(rf"replayed +{replays}  calls\neager +2  warm-up", said), said
    assert losses[-1] < losses[0]
    more = ["--compare"] if name in ("hf_trainer", "trl_sft") else []
    assert run(monkeypatch, name, *options, "--eager", *more) == losses
    said = capsys.readouterr().out
    assert re.search(r"replayed +0  calls", said) and len(more) == said.count(
        " times as fast as without packgraph"
    )
