"""Small runs of transformers' Trainer and trainers made of it."""

import contextlib
import random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import packgraph

WORDS = 258
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
)


def model(**changes: Any) -> LlamaForCausalLM:
    """The same small model every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    given = {**sizes, "num_attention_heads": 2, "initializer_range": 0.3, **changes}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **given))


def documents(count: int, longest: int = 40, seed: int = 0) -> list[dict[str, list[int]]]:
    """Documents of token ids, none shorter than two."""
    draw = random.Random(seed)
    lengths = [draw.randint(2, longest) for _ in range(count)]
    return [{"input_ids": [draw.randrange(256) for _ in range(n)]} for n in lengths]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*alphabet, "<eos>", "<pad>"])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    found.chat_template = TEMPLATE
    return found


def options(folder: Any, **changes: Any) -> dict[str, Any]:
    """Arguments of a run on the CPU: six steps of two microbatches of four examples."""
    return {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        **changes,
    }


def trained(trainer: Any, eager: bool = False, **how: Any) -> Any:
    """The trainer after its run."""
    with packgraph.eager("comparison") if eager else contextlib.nullcontext():
        trainer.train(**how)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    """Everything that a trainer has logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    """Whether two models are equal bit by bit."""
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
