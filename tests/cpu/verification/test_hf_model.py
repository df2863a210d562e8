"""Any config.json of transformers against eager training, and files that are none."""

import json

import pytest

from packgraph import cli
from packgraph.verification.command import read_hf_config

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def written(folder, content):
    file = folder / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_a_config_is_verified_bit_by_bit(tmp_path, capsys):
    file = written(tmp_path, CONFIG)
    assert cli.main(["verify", "--hf-config", str(file), "--layers", "2"]) == 0
    printed = capsys.readouterr().out
    assert "6 steps" in printed and "9 / 5 warm-up" in printed and "qwen3" in printed
    assert read_hf_config(file)["num_hidden_layers"] == 8


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list, not a JSON object"),
        ({"model_type": 3}, "names no model_type"),
        ({"model_type": ""}, "names no model_type"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        (CONFIG | {"model_type": "bert"}, "bert: BertLMHeadModel cannot be packed"),
        (CONFIG | {"hidden_size": "x"}, "config.json"),
        (CONFIG | {"num_attention_heads": 0}, "config.json"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_no_config_of_a_language_model_is_named(tmp_path, content, match, capsys):
    file = str(written(tmp_path, content))
    assert cli.main(["verify", "--hf-config", file, "--layers", "1"]) == 2
    assert match in capsys.readouterr().err


def test_the_command_verifies_a_config_and_says_what_does_not_go_together(tmp_path, capsys):
    file = str(written(tmp_path, CONFIG))
    values = tmp_path / "values.toml"
    values.write_text("[run]\nsteps = 3\n")
    words = ["--layers", "1", "--steps", "4", "--graph.capacities", "64x8"]
    assert cli.main(["verify", "--hf-config", file, *words]) == 0
    assert "64x8" in capsys.readouterr().out
    for words, said in (
        (["verify", "qwen3-tiny", "--hf-config", file], "exclude each other"),
        (["verify", "--layers", "2"], "an option of --hf-config"),
        (["verify", "--hf-config", file, "--hf.random", "no"], "and so does --hf.random"),
        (["verify", "--hf-config", file, "--config", str(values)], "exclude each other"),
        (["verify", "--hf-config", file, "--graph.capacities", "auto"], "draws: name hf:FOLDER"),
        (["verify", "--hf-config", file, "--layers", "0"], "--layers must be at least 1"),
        (["verify", "--hf-config", str(tmp_path / "none.json")], "cannot be read"),
    ):
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
