"""Train a model of transformers with its Trainer, on packed documents through graphs.

    python examples/hf_trainer.py --steps 20 --out run

Three lines differ from a program without packgraph: the import, the class, and the trainer's name.
Runs on a GPU, or in under a minute on a CPU. The data are Python's help pages as bytes, so nothing
is downloaded. `--eager` does the same without graphs; every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile

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


def main() -> list[float]:
    """Train, evaluate, save; the losses that were logged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="folder for checkpoints; a temporary one by default")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    model = AutoModelForCausalLM.from_config(config)
    data = documents()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            options.out or folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=5,
            logging_nan_inf_filter=False,  # else the host waits for every loss
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = PackingTrainer(model, arguments, train_dataset=data[64:], eval_dataset=data[:64])
        with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
            trainer.train()
        print(trainer.stats)
        AutoModelForCausalLM.from_pretrained(f"{arguments.output_dir}/checkpoint-{options.steps}")
    assert options.eager or trainer.stats.replayed > 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
