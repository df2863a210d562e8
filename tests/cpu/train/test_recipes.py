"""Whole runs that come with packgraph: each in small, by a tiny model in the place of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tuningkit import chats, preferences, tiny_model, word_tokenizer

from packgraph import cli
from packgraph.commands import read_train
from packgraph.train.build import with_shape
from packgraph.train.config.hub import _NAME
from packgraph.train.config.presets import recipes
from packgraph.train.config.reading import ConfigError, load_file
from packgraph.train.validate import validate

ANSWERS = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
RANKS = {name: 4 if name.endswith("4-gpus") else 1 for name in recipes()}
SMALL = [
    *("--graph.capacities", "64x8", "--run.tokens-per-step", "120", "--run.steps", "3"),
    *("--run.dtype", "float32", "--graph.compile", "false", "--run.checkpoint-every", "0"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder with a model, chats and preferences."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tiny_model(tmp_path / "model"), ANSWERS)
    chats(tmp_path / "chats.jsonl")
    preferences(tmp_path / "pairs.jsonl")
    return tmp_path


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_trains(name: str, place: Path) -> None:
    told = recipes()[name].read_text().splitlines()
    assert all(line.startswith("# ") or line == "#" for line in told[:3])
    assert f"packgraph{'.cli' * (RANKS[name] > 1)} train {name} " in told[2]
    values = load_file(recipes()[name]).values
    assert _NAME.fullmatch(values["hf"]["path"])
    data = "pairs.jsonl" if "dpo" in name else "chats.jsonl"
    words = [name, "--hf.path", "model", "--data.path", data, *SMALL, "--run.name", "x"]
    if RANKS[name] == 1:
        assert cli.main(["train", *words]) == 0
        assert len((place / "runs" / "x" / "metrics.jsonl").read_text().splitlines()) == 3
        return
    alone = {"dynamic_cp": False, "cp": 1, "ep": 1, "shard": "none"}
    changed = [f"--parallel.{key}={json.dumps(value).strip(chr(34))}"
               for key, value in alone.items() if key in values["parallel"]]  # fmt: skip
    assert cli.main(["train", *words, *changed]) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama-3.1-8b-4-gpus", "Llama"),
        ("qwen3-30b-a3b-4-gpus", "Qwen3Moe"),
        ("long-128k-4-gpus", "Qwen3"),
    ],
)
def test_four_gpus_can_do_what_a_recipe_asks_for(name: str, kind: str, place: Path) -> None:
    """By the usual sizes of a family, without memory."""
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(place / "shape")
    words = ["--hf.path", str(place / "shape"), "--hf.random", "true", "--data.path", "chats.jsonl"]
    asked = read_train([name, *words, "--data.tokenizer", "model"])
    assert not isinstance(asked, int)
    found, notes = with_shape(asked.arguments[0], "cuda")
    assert not validate(found, "cuda", world=4) and not notes


def test_recipes_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in RANKS)
    assert cli.main(["train", "qwen3-8b-lora", "--help"]) == 0  # which asks the hub for nothing
    assert "a whole number" in capsys.readouterr().out
    assert cli.main(["recipes", "more"]) == 2


def test_yaml_is_read_as_toml_is(place: Path) -> None:
    lines = [
        *('preset: "hf"', "hf: {path: model}", "data: {path: chats.jsonl, source: jsonl}"),
        "optimizer: {learning_rate: 2e-4}",
        "graph: {capacities: [64x8]}",
        "lora:",
        "  rank: 4",
    ]
    Path("run.yaml").write_text("\n".join(lines))
    asked = read_train(["--config", "run.yaml"])
    assert not isinstance(asked, int)
    config = asked.arguments[0].read()[0]
    assert (config.optimizer.learning_rate, config.lora.rank) == (2e-4, 4)
    for name, text in ("run.yaml", "{a: 1, a: 2}"), ("run.json", '{"run": {"a": 1, "a": 2}}'):
        Path(name).write_text(text)
        with pytest.raises(ConfigError, match="a is there twice"):
            load_file(Path(name))
    Path("run.yaml").write_text("preset: [hf\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML: while parsing"):
        load_file(Path("run.yaml"))
