"""Train a model of transformers with its Trainer, on packed documents through graphs.

    python examples/hf_trainer.py --steps 20 --out run

Three lines differ from a program without packgraph: the import, the class, and the trainer's name.
Runs on a GPU, or in about a minute on a CPU. The data are Python's help pages as bytes, so nothing
is downloaded. `--compare` trains with the plain Trainer first, and says how many times as fast the
packed one is; `--eager` trains without graphs, and every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import packgraph
from packgraph.integrations.transformers import PackedTrainer

EOS = 256


class PackingTrainer(PackedTrainer, Trainer):
    """Trainer, over packed batches and graphs."""


def documents() -> list[dict[str, list[int]]]:
    """Paragraphs of help pages as bytes, each with its end."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return [{"input_ids": [*text.encode()[:400], EOS]} for text in paragraphs if text.strip()]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows of equal length, as the plain Trainer needs them."""
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    masks = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, True, EOS)
    labels = tokens.masked_fill(masks == 0, -100)
    return {"input_ids": tokens, "attention_mask": masks, "labels": labels}


def main() -> list[float]:
    """Train, evaluate, save; the losses that were logged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="folder for checkpoints; a temporary one by default")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--compare", action="store_true", help="with the plain Trainer")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    data = documents()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            options.out or folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=8,
            learning_rate=3e-3,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=5,
            logging_nan_inf_filter=False,  # else the host waits for every loss
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            include_num_input_tokens_seen="non_padding",
            report_to="none",
            disable_tqdm=True,
        )

        def made(kind: type[Trainer], **more: Any) -> Trainer:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            return kind(model, arguments, train_dataset=data[64:], eval_dataset=data[:64], **more)

        if options.compare:
            plain = made(Trainer, data_collator=padded)
            seconds = plain.train().metrics["train_runtime"]
            before = plain.state.num_input_tokens_seen / seconds
        trainer = made(PackingTrainer)
        with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
            now = trainer.train().metrics["packgraph/tokens_per_second"]
        if options.compare:
            print(f"{now / before:.2f} times as fast as without packgraph ({before:,.0f} tokens/s)")
        print(trainer.stats)
        AutoModelForCausalLM.from_pretrained(f"{arguments.output_dir}/checkpoint-{options.steps}")
    assert options.eager or trainer.stats.replayed > 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
