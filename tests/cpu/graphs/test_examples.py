"""The loops of preferences and of rollouts learn, and do as they do without graphs."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import packgraph

EXAMPLES = Path(__file__).parents[3] / "examples"
PREFERENCES, ROLLOUTS = EXAMPLES / "dpo.py", EXAMPLES / "grpo_loop.py"


def run(monkeypatch, program, *options):
    monkeypatch.setattr("sys.argv", [str(program), *options])
    return runpy.run_path(str(program))["main"]()


def test_preferences_by_graphs_equal_those_without(monkeypatch, capsys):
    found = run(monkeypatch, PREFERENCES, "--steps", "12")
    said = capsys.readouterr().out
    assert len(re.findall(r"replayed +11  calls\neager +1  warm-up", said)) == 2, said
    # the reference is what the policy began with
    assert found[0] == (pytest.approx(0.6931472), 0.0, 0.0)
    assert found[-1][0] < 0.6 and found[-1][1] == 1.0 and found[-1][2] > 0.2
    assert run(monkeypatch, PREFERENCES, "--steps", "12", "--eager") == found
    assert len(re.findall(r"replayed +0  calls", capsys.readouterr().out)) == 2


def test_the_loss_is_that_of_the_paper(monkeypatch, tmp_path):
    program = runpy.run_path(str(PREFERENCES))
    rows = [{"chosen": f"ask {'a' * n} yes", "rejected": f"ask {'a' * n} never"} for n in (1, 9, 4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    pairs = program["pairs_of"](program["DataConfig"](source="jsonl", path=str(path)))
    documents = [document for pair in pairs for document in pair]
    batch = packgraph.PackedBatch.build(documents, program["CAPACITY"])
    torch.manual_seed(0)
    policy, reference = torch.randn(2, program["CAPACITY"].tokens)
    losses = []
    for number in range(0, len(documents), 2):
        gains = []
        for document in (number, number + 1):
            start, stop = batch.cu_seqlens[document : document + 2].tolist()
            gains.append((policy - reference)[start:stop].sum())
        losses.append(-torch.log(torch.sigmoid(program["BETA"] * (gains[0] - gains[1]))))
    loss, accuracy, _ = program["loss_of"](policy, reference, batch)
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert 0 <= float(accuracy) <= 1


def test_a_file_without_preferences_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "no preference"}\n')
    with pytest.raises(SystemExit, match="needs `chosen` and `rejected`"):
        run(monkeypatch, PREFERENCES, "--data", str(path))


def test_rollouts_and_updates_by_graphs_equal_those_without(monkeypatch, capsys):
    found = run(monkeypatch, ROLLOUTS, "--steps", "16")
    said = capsys.readouterr().out
    assert re.search(r"replayed +110  calls\neager +2  warm-up", said), said
    assert found[-1][1] > 0.6 > 0.4 > found[0][1]
    assert run(monkeypatch, ROLLOUTS, "--steps", "16", "--eager") == found
    assert re.search(r"replayed +0  calls", capsys.readouterr().out)
