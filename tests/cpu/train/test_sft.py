"""Fine-tuning by one command, as in examples/sft.toml, and what comes out of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig
from tuningkit import chats, tiny_model, word_tokenizer

from packgraph import cli

EXAMPLE = Path(__file__).parents[3] / "examples" / "sft.toml"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_model_learns_to_answer_by_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model = word_tokenizer(
        tiny_model(tmp_path / "model", hidden_size=64, initializer_range=0.2), TEMPLATE
    )
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    line = {"messages": [{"role": "user", "content": "hi"},
                         {"role": "assistant", "content": "hello you"}]}  # fmt: skip
    Path("chats.jsonl").write_text((json.dumps(line) + "\n") * 16)
    options = [
        "train", "--config", str(EXAMPLE), "--hf.path", str(model),
        "--data.path", "chats.jsonl", "--run.name", "sft", "--graph.capacities", "256x8",
        "--run.tokens-per-step", "100", "--run.steps", "60", "--run.dtype", "float32",
        "--optimizer.learning-rate", "2e-2",
    ]  # fmt: skip
    assert cli.main(options) == 0
    capsys.readouterr()
    assert cli.main(["chat", "runs/sft", "--prompt", "hi", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.replace(" ", "") == "helloyou\n"
    assert cli.main(["export", "runs/sft", "out"]) == 0
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert tokenizer.chat_template == TEMPLATE
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<|im_end|>")]
    generation = GenerationConfig.from_pretrained("out")
    assert generation.eos_token_id == ends
    assert generation.temperature == 0.5, "as beside the model"
    assert generation.pad_token_id == tokenizer.convert_tokens_to_ids("<pad>")


def test_a_model_of_packgraph_on_bytes_answers_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    chats(tmp_path / "chats.jsonl")
    options = [
        "train", "qwen3-tiny", "--run.name", "own", "--run.steps", "3", "--data.source", "jsonl",
        "--data.path", "chats.jsonl", "--graph.capacities", "128x4", "--run.tokens-per-step", "100",
        "--model.num-layers", "1",
    ]  # fmt: skip
    assert cli.main(options) == 0
    capsys.readouterr()
    lines = iter(["one\n", "\n", "two\n"])
    monkeypatch.setattr("sys.stdin", lines)
    assert cli.main(["chat", "runs/own", "--tokens", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert cli.main(["chat", "runs/own", "--tokens", "3", "--text", "--prompt", "def "]) == 0
    assert cli.main(["chat", "runs/own", "--tokens", "0"]) == 2
    assert cli.main(["chat", "runs/none"]) == 2
