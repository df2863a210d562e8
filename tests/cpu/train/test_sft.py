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


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: Any) -> Path:
    """The folder of a model that the run `runs/sft` was fine-tuned from."""
    monkeypatch.chdir(tmp_path)
    model = word_tokenizer(tiny_model(tmp_path / "model"), TEMPLATE)
    (model / "generation_config.json").write_text("{}")
    chats(tmp_path / "chats.jsonl")
    options = [
        "train", "--config", str(EXAMPLE), "--hf.path", str(model), "--data.path", "chats.jsonl",
        "--run.name", "sft", "--graph.enabled", "false", "--graph.capacities", "256x8",
        "--run.tokens-per-step", "100", "--run.steps", "1", "--run.dtype", "float32",
    ]  # fmt: skip
    assert cli.main(options) == 0
    return model


def test_an_export_that_did_not_end_is_repeated_by_the_same_command(
    tuned: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*paths: Path) -> None:
        raise KeyboardInterrupt

    out = Path("out")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", interrupted)
        assert cli.main(["export", "runs/sft", "out"]) == cli.INTERRUPTED
    assert not list(out.iterdir())
    (out / "model.safetensors").write_text("of somebody else")
    assert cli.main(["export", "runs/sft", "out"]) == 2
    assert "already holds a checkpoint (model.safetensors)" in capsys.readouterr().err
    assert (out / "model.safetensors").read_text() == "of somebody else"
    (out / ".writing-export").mkdir()  # now of an export that was killed while it moved files
    (out / ".writing-export" / "config.json").write_text("{}")
    assert cli.main(["export", "runs/sft", "out"]) == 0
    assert AutoTokenizer.from_pretrained("out").chat_template == TEMPLATE
    assert (out / "model.safetensors").stat().st_size > 1000
    assert not (out / ".writing-export").exists()
    (tuned / "generation_config.json").write_text("{")
    assert cli.main(["export", "runs/sft", "other"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model/generation_config.json: not valid JSON" in said and not list(
        Path("other").iterdir()
    )


def test_what_a_link_leads_to_outside_of_the_model_is_not_exported(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = Path("id_rsa").absolute()
    secret.write_text('{"secret": 1}')
    for name in ("added_tokens.json", "generation_config.json"):
        whole = (tuned / name).exists() and (tuned / name).read_bytes()
        (tuned / name).unlink(missing_ok=True)
        (tuned / name).symlink_to(secret)
        assert cli.main(["export", "runs/sft", "out"]) == 2
        said = capsys.readouterr().err
        assert f"{name}: a link to {secret}, which is none of the model's files" in said
        assert not Path("out").exists()
        (tuned / name).unlink()
        if whole:
            (tuned / name).write_bytes(whole)
    # As in the cache of the hub: a snapshot's files are links to blobs beside all snapshots.
    snapshot = Path("models--a--b/snapshots/c0ffee").absolute()
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    for number, file in enumerate(tuned.iterdir()):
        blob = snapshot.parents[1] / "blobs" / str(number)
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    tuned.rmdir()
    tuned.symlink_to(snapshot)
    assert cli.main(["export", "runs/sft", "out"]) == 0
    assert AutoTokenizer.from_pretrained("out").chat_template == TEMPLATE


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
    answers = []
    for seed in (1, 1, 2):
        drawn = ["--temperature", "2", "--top-p", "0.9", "--seed", str(seed), "--prompt", "one"]
        capsys.readouterr()
        assert cli.main(["chat", "runs/own", "--tokens", "30", *drawn]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    assert cli.main(["chat", "runs/own", "--tokens", "0", "--top-p", "0"]) == 2
    assert "--tokens" in (words := capsys.readouterr().err) and "--top-p" in words
    assert cli.main(["chat", "runs/none"]) == 2
