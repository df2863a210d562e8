"""Weights into and out of a run: from Hugging Face's layout, through training, and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tuningkit import word_tokenizer

from packgraph import cli
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.hf import load_pretrained, save_pretrained

SHAPE = DecoderConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=5000.0,
    tie_embeddings=True,
)


@pytest.fixture
def start(tmp_path: Path) -> tuple[Path, list[str]]:
    """Weights of a small model, and the words of a run on little data."""
    save_pretrained(DecoderModel(SHAPE, seed=7), tmp_path / "weights")
    rows = [{"text": "to be or not to be " * (1 + index % 3)} for index in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "train",
        "qwen3-tiny",
        "--run.init-from",
        str(tmp_path / "weights"),
        "--data.source",
        "jsonl",
        "--data.path",
        str(tmp_path / "data.jsonl"),
        "--run.folder",
        str(tmp_path / "runs"),
        "--graph.capacities",
        "64x8",
        "--run.tokens-per-step",
        "100",
        "--run.steps",
        "3",
        "--run.device",
        "cpu",
        "--run.name",
        "mine",
    ]
    return tmp_path, words


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(words) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def states(path: Path) -> dict[str, torch.Tensor]:
    return load_pretrained(path)[0].state_dict()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_starts_from_weights_in_their_shape_and_gives_them_back(
    start: Any, dtype: str
) -> None:
    folder, words = start
    # Without learning the weights come back as they went in.
    assert cli.main([*words, "--run.dtype", dtype, "--optimizer.learning-rate", "1e-30"]) == 0
    assert cli.main(["export", str(folder / "runs" / "mine"), str(folder / "out")]) == 0
    before, after = states(folder / "weights"), states(folder / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value.to(getattr(torch, dtype)))
    model, config = load_pretrained(folder / "out")
    assert config.rope_theta == 5000.0 and next(model.parameters()).dtype == getattr(torch, dtype)


def test_a_resumed_run_takes_its_checkpoint_and_needs_the_weights_no_more(start: Any) -> None:
    folder, words = start
    assert cli.main(words) == 0
    assert cli.main(["export", str(folder / "runs" / "mine"), str(folder / "three")]) == 0
    (folder / "weights").rename(folder / "gone")
    config = str(folder / "runs" / "mine" / "config.json")
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "4"]) == 0
    assert cli.main(["export", str(folder / "runs" / "mine"), str(folder / "four")]) == 0
    start_of, three, four = (states(folder / name) for name in ("gone", "three", "four"))
    assert not torch.equal(three["norm.weight"], start_of["norm.weight"])
    assert not torch.equal(three["norm.weight"], four["norm.weight"])


def test_weights_bring_their_tokenizer(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = start
    word_tokenizer(folder / "weights", None)
    assert cli.main(words) == 0
    data = json.loads((folder / "runs" / "mine" / "config.json").read_text())["data"]
    assert data["tokenizer"] == str(folder / "weights")
    assert "one token a byte" not in capsys.readouterr().err
    # Bytes are a choice that is told.
    assert cli.main([*words[:-1], "bytes", "--data.tokenizer", "bytes"]) == 0
    assert "warning: text becomes one token a byte" in " ".join(capsys.readouterr().err.split())


def test_what_does_not_fit_is_named(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = start
    text = refused(capsys, *words, "--model.num-layers", "3", "--model.rope-theta", "1e4")
    assert (
        "model.num_layers is 2 there, 3 here; model.rope_theta is 5000.0 there, 10000.0 here"
        in text
    )
    assert "nowhere/config.json does not exist" in refused(
        capsys, *words, "--run.init-from", str(folder / "nowhere")
    )
    (folder / "weights" / "config.json").write_text('{"model_type": "llama"}')
    assert "weights/config.json: no model that can be loaded here" in refused(capsys, *words)


def test_exports_that_cannot_be_are_named(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = start
    assert "config.json: cannot be read" in refused(
        capsys, "export", str(folder), str(folder / "out")
    )
    assert cli.main(words) == 0
    run = folder / "runs" / "mine"
    assert "already holds a checkpoint" in refused(
        capsys, "export", str(run), str(folder / "weights")
    )
    assert "could not be written: " in refused(
        capsys, "export", str(run), str(folder / "data.jsonl" / "out")
    )
    (run / "checkpoints" / "step-00000003" / ".metadata").unlink()
    assert ".metadata: missing" in refused(capsys, "export", str(run), str(folder / "out"))
    (run / "checkpoints").rename(folder / "moved")
    assert "there is no checkpoint to export" in refused(
        capsys, "export", str(run), str(folder / "out")
    )
    assert not (folder / "out").exists()
