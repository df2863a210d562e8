"""Good inputs of the trainer, and ways to change one thing in them.

prepare(base) ─▶ models, tokenizers, documents, shards, a run ─▶ one thing changed
"""

import contextlib
import itertools
import json
import math
import os
import random
import shlex
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from packgraph import cli
from packgraph.train.run_files import CHECKSUM, checksum

DEEP = "\ue000deep"  # becomes 50,000 brackets
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, -1, -32, 10**9, 2**31, 2**63, 10**30, 10**400),
    *(0.5, 2.0, -0.5, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *("", "evil", "32", "null", "\ud800", "\0", "../../evil", "x" * 5000, DEEP),
    *([], [1], ["a", "b"], [None], [[]], {}, {"a": 1}, {"": None}),
)
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "naïve", "日本", "to", "be", "or", "not")
TEXT, CHATS, MODEL = "text.jsonl", "chats.jsonl", "model.safetensors"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = shlex.split(
    "--model.num-layers 1 --model.hidden-size 16 --model.intermediate-size 32 --model.num-heads 2 "
    "--model.num-kv-heads 1 --model.head-dim 8"
)
ONE_STEP = shlex.split(
    "--graph.enabled false --run.device cpu --run.tracker none --run.name r --run.dtype float32 "
    "--run.tokens-per-step 900 --graph.capacities 256x8 --run.checkpoint-every 0"
)


def prepare(base: Path) -> str:
    """Write good inputs into `base`."""
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 30))) for _ in range(9)]
    rows = [{"text": text} for text in texts]
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in itertools.pairwise(texts)
    ]
    for name, lines in ((TEXT, rows), (CHATS, chats)):
        (base / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_tokenizers(base / "tokenizers", texts)
    shutil.copytree(base / "tokenizers/bpe", base / "tokenizer")
    for kind, more in ARCHITECTURES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
        model = transformers.AutoModelForCausalLM.from_config(config)
        folder = base / "models" / kind
        model.save_pretrained(folder)
        if kind == "qwen3":
            model.save_pretrained(base / "models" / "sharded", max_shard_size="20KB")
    for folder in (base / "models").iterdir():
        shutil.copytree(base / "tokenizer", folder, dirs_exist_ok=True)
    words = ["data", "build", base / "shards", "--source", "jsonl", "--path", base / TEXT]
    assert cli.main([*map(str, words), "--workers", "1", "--rows-per-shard", "5"]) == 0
    words = ["train", "qwen3-tiny", *SMALL, *ONE_STEP, "--run.folder", base / "runs"]
    words += ["--run.steps", "2", "--run.checkpoint-every", "1", *data_words(base)]
    assert cli.main([*map(str, words)]) == 0
    words = [*words, "--run.steps", "3", "--run.resume", "true"]
    shutil.copytree(base / "runs", base / "clean")
    words[words.index("--run.folder") + 1] = base / "clean"
    assert cli.main([*map(str, words)]) == 0
    return "made"


SIZES = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 64},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512, "n_inner": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def _write_tokenizers(folder: Path, texts: list[str]) -> None:
    """Three kinds, with all parts that a tokenizer.json can have."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    made = {
        "bpe": Tokenizer(models.BPE()),
        "unigram": Tokenizer(models.Unigram()),
        "wordpiece": Tokenizer(models.WordPiece(unk_token="<unk>")),
    }
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    shared = {"special_tokens": special, "show_progress": False}
    trainers = {
        "bpe": BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **shared),
        "unigram": UnigramTrainer(vocab_size=60, unk_token="<unk>", **shared),
        "wordpiece": WordPieceTrainer(vocab_size=200, **shared),
    }
    made["bpe"].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made["bpe"].decoder = decoders.ByteLevel()
    made["unigram"].normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace("  ", " "), normalizers.Lowercase()]
    )
    made["unigram"].pre_tokenizer = pre_tokenizers.Metaspace()
    made["unigram"].decoder = decoders.Metaspace()
    made["wordpiece"].normalizer = normalizers.BertNormalizer()
    made["wordpiece"].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made["wordpiece"].decoder = decoders.WordPiece()
    for kind, tokenizer in made.items():
        tokenizer.train_from_iterator(texts, trainers[kind])
        if kind != "bpe":
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A <|im_end|>",
                special_tokens=[(one, tokenizer.token_to_id(one)) for one in special],
            )
        if kind == "unigram":
            tokenizer.enable_truncation(9)
            tokenizer.enable_padding(length=99)
        (folder / kind).mkdir(parents=True)
        tokenizer.save(str(folder / kind / "tokenizer.json"))
        named = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
        (folder / kind / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / kind / "special_tokens_map.json").write_text(
            json.dumps({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}})
        )


def data_words(base: Path, name: str = TEXT) -> list[str]:
    """Options of `train` for one of the files of documents."""
    return ["--data.source", "jsonl", "--data.path", str(base / name)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values within a JSON value; of large tables a few."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    for key, child in inner[:30]:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(value: Any, draw: random.Random) -> tuple[str, Any]:
    """`value`, which is JSON, with one thing changed, and what that is."""
    value = json.loads(json.dumps(value))
    found = list(places(value))
    if not found or draw.random() < 0.03:
        odd = draw.choice(ODD)
        return f"all of it = {show(odd)}", odd
    path = draw.choice(found)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, where = path[-1], ".".join(map(str, path))
    old = holder[key]
    kind = draw.choice(("odd", "odd", "odd", "odd", "drop", "retype", "length", "swap", "nudge"))
    if kind == "drop":
        del holder[key]
        return f"{where} dropped", value
    if kind == "swap":
        other = draw.choice(found)
        holder[key] = value_at(value, other) if other[: len(path)] != path else None
    elif kind == "retype":
        holder[key] = str(old) if not isinstance(old, str) else [old]
    elif kind == "length" and isinstance(old, list):
        holder[key] = draw.choice((old[:-1], old + old[-1:], old * 2))
    elif kind == "nudge" and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = draw.choice((old + 1, old - 1, -old, old * 2, old + 0.5, old * 10**6))
    else:
        holder[key] = draw.choice(ODD)
    return f"{where} = {show(holder[key])}", value


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of what stands there within a JSON value."""
    for key in path:
        value = value[key]
    return json.loads(json.dumps(value))


def show(value: Any) -> str:
    """A value in a few characters."""
    with contextlib.suppress(ValueError):
        text = repr(value)
        return text if len(text) < 60 else text[:50] + "…"
    return "a huge number"


def dump(value: Any) -> str:
    """JSON text, with numbers that Python does not write itself."""
    sys.set_int_max_str_digits(0)
    try:
        text = json.dumps(value)
    finally:
        sys.set_int_max_str_digits(4300)
    return text.replace(json.dumps(DEEP), "[" * 50_000 + "]" * 50_000)


def mutate_json(file: Path, draw: random.Random) -> str:
    """Change one thing in a JSON file; returns what."""
    what, value = mutated(json.loads(file.read_text()), draw)
    file.write_text(dump(value))
    return f"{file.name}: {what}"


def damage(file: Path, draw: random.Random) -> str:
    """Make a file another one, or none; returns what was done."""
    content = file.read_bytes()
    at = draw.randrange(max(len(content), 1))
    siblings = sorted(path for path in file.parent.iterdir() if path.is_file() and path != file)
    kinds: dict[str, Callable[[], Any]] = {
        "cut": lambda: file.write_bytes(content[:at]),
        "empty": lambda: file.write_bytes(b""),
        "zeros": lambda: file.write_bytes(bytes(len(content))),
        "a flipped byte": lambda: file.write_bytes(
            content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :] if content else b"\xff"
        ),
        "UTF-16": lambda: file.write_bytes(content.decode("latin-1").encode("utf-16")),
        "a byte order mark": lambda: file.write_bytes(b"\xef\xbb\xbf" + content),
        "no UTF-8": lambda: file.write_bytes(content[:at] + b"\xff\xfe" + content[at:]),
        "twice": lambda: file.write_bytes(content * 2),
        "a list": lambda: file.write_bytes(b"[]"),
        "null": lambda: file.write_bytes(b"null"),
        "deep": lambda: file.write_bytes(b"[" * 10**5 + b"]" * 10**5),
        "a folder": lambda: (file.unlink(), file.mkdir()),
        "gone": file.unlink,
        "a link to nothing": lambda: (file.unlink(), file.symlink_to("absent")),
        "a link to itself": lambda: (file.unlink(), file.symlink_to(file.name)),
        "a pipe": lambda: (file.unlink(), os.mkfifo(file)),
        "an unreadable disk": lambda: (file.unlink(), file.symlink_to("/proc/self/mem")),  # EIO
    }
    if siblings:
        kinds["another file"] = lambda: shutil.copyfile(draw.choice(siblings), file)
    kind = draw.choice(sorted(kinds))
    kinds[kind]()
    return f"{file.name} is {kind}"


def mutate_safetensors(file: Path, draw: random.Random) -> str:
    """Change the header of a file of safetensors, or a tensor in it."""
    if draw.random() < 0.5:
        tensors = load_file(file)
        name = draw.choice(sorted(tensors))
        old = tensors.pop(name)
        kind = draw.choice(("left out", "renamed", "cut", "int8", "flat", "nan", "of a dimension"))
        changed = {
            "renamed": lambda: {name + "x": old},
            "cut": lambda: {name: old[:-1].contiguous()},
            "int8": lambda: {name: old.to(torch.int8)},
            "flat": lambda: {name: old.flatten()},
            "nan": lambda: {name: torch.full_like(old, math.nan)},
            "of a dimension": lambda: {name: old[None]},
        }
        save_file(tensors | changed.get(kind, dict)(), file, metadata={"format": "pt"})
        return f"{file.name}: {name} is {kind}"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    what, header = mutated(json.loads(content[8 : 8 + size]), draw)
    text = dump(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return f"{file.name}, header: {what}"


def resign(file: Path, content: Any) -> None:
    """Write JSON with a checksum that is right, where it can have one."""
    if isinstance(content, dict):
        content.pop(CHECKSUM, None)
        with contextlib.suppress(ValueError, RecursionError):
            content[CHECKSUM] = checksum(json.loads(dump(content)))
    file.write_text(dump(content))


def mutate_index(index: Path, draw: random.Random) -> str:
    """Change an index of shards; its checksum is made right afterwards."""
    table = np.load(index)
    kind = draw.choice(("shorter", "longer", "another type", "objects", "a value", "flat", "empty"))
    if kind == "a value":
        at, odd = draw.randrange(len(table)), draw.choice((0, -1, 10**6, 2**31 - 1, 3))
        name = draw.choice(table.dtype.names) if table.dtype.names else None
        with warnings.catch_warnings(), contextlib.suppress(OverflowError):
            warnings.simplefilter("ignore")
            if name:
                table[name][at] = odd
                kind = f"{name} {at} = {odd}"
            else:
                table[at] = odd
                kind = f"{at} = {odd}"
    changed = {
        "shorter": lambda: table[:-1],
        "longer": lambda: np.concatenate([table, table[-1:]]),
        "another type": lambda: np.arange(len(table), dtype="<f8"),
        "objects": lambda: np.array([{}] * len(table), dtype=object),
        "flat": lambda: table[None],
        "empty": lambda: table[:0],
    }.get(kind, lambda: table)()
    np.save(index, changed, allow_pickle=True)
    return f"{index.name}: {kind}"
