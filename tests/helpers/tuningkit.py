"""Tiny models of transformers, tokenizers with chat templates, and runs over them."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from packgraph import cli

VOCAB = 320  # those of the byte tokenizer, and some


def tiny_model(folder: Path, **changes: object) -> Path:
    """A random model in `folder`."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "bos_token_id": 256,
            "eos_token_id": 257,
        }
        | changes
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def chats(path: Path, count: int = 24) -> Path:
    """Short chats in JSON lines."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"How much is {number} + {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}."},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def preferences(path: Path, count: int = 40, seed: int = 0) -> Path:
    """Which digit did I say? Answers of any length."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        digit = draw.choice("0123456789")
        row = {
            "prompt": f"{'oh, ' * draw.randrange(3)}I said {digit}.",
            "chosen": f" Yes: {digit}{'!' * draw.randrange(12)}",
            "rejected": f" Ugh{'. ' * draw.randrange(12)}{digit}",
        }
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return path


def words(folder: Path, model: Path, *more: str, steps: int = 6) -> list[str]:
    """Options of a run `mine` of `model` in `folder`."""
    folder.mkdir(exist_ok=True)
    data = folder / "data.jsonl"
    if not data.exists():
        chats(data)
    return [
        "train", f"hf:{model}", "--run.name", "mine", "--run.folder", str(folder / "runs"),
        "--run.steps", str(steps), "--run.dtype", "float32", "--run.tokens-per-step", "120",
        "--data.source", "jsonl", "--data.path", str(data), "--graph.capacities", "128x4",
        "--optimizer.learning-rate", "1e-2", "--optimizer.decay-steps", "8",
        *([] if (model / "tokenizer.json").exists() else ["--data.tokenizer", "bytes"]), *more,
    ]  # fmt: skip


def train(folder: Path, model: Path, *more: str, steps: int = 6) -> Path:
    """Train, and the folder of the run."""
    assert cli.main(words(folder, model, *more, steps=steps)) == 0
    return folder / "runs" / "mine"


def logits(folder: Path) -> torch.Tensor:
    """What the model in `folder` says of some tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(0, 300, 7)[None]).logits


def word_tokenizer(folder: Path, template: str | None, **special: str) -> Path:
    """A tokenizer of words and single signs with some special tokens, and a chat template."""
    signs = ["<|im_start|>", "<|im_end|>", "<eos>", "<pad>", "<unk>"]
    letters = [chr(code) for code in range(32, 127)] + ["\n", "\u0120", "\u010a"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(signs + letters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(signs)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"eos_token": "<eos>", "pad_token": "<pad>"} | special
    if template is not None:
        options["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def byte_level_tokenizer(folder: Path, template: str | None, **config: object) -> Path:
    """A tokenizer.json of single bytes with five special tokens, and a chat template."""
    folder.mkdir(exist_ok=True, parents=True)
    special = ["<pad>", "<s>", "</s>", "<|turn|>", "<|stop|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({word: i for i, word in enumerate([*special, *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder
