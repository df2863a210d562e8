"""Fine-tune with TRL's SFTTrainer, on packed documents through graphs.

    python examples/trl_sft.py --steps 20

Three lines differ from a program without packgraph: the import, the class, and the trainer's name.
Prompts are masked, activations checkpointed and rows packed as TRL does it. Runs on a GPU, or in
under a minute on a CPU. Data and tokenizer (bytes) are made on the spot, so nothing is downloaded.
`--compare` trains with the plain SFTTrainer first, and says how many times as fast the packed one
is; `--eager` trains without graphs, and every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, set_seed
from trl import SFTConfig, SFTTrainer

import packgraph
from packgraph.integrations.trl import PackedTrainer


class PackedSFTTrainer(PackedTrainer, SFTTrainer):
    """SFTTrainer, over packed batches and graphs."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and one each for the end and for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*alphabet, "<eos>", "<pad>"])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def examples() -> Dataset:
    """Topics of Python's help as prompts, what it says about them as completions."""
    rows = [
        {"prompt": f"What is {topic}?\n", "completion": paragraph[:200]}
        for topic, text in pydoc_data.topics.topics.items()
        for paragraph in text.split("\n\n")[:8]
        if paragraph.strip()
    ]
    return Dataset.from_list(rows[:400])


def main() -> list[float]:
    """Train and save; the losses that were logged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="folder for checkpoints; a temporary one by default")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--compare", action="store_true", help="with the plain SFTTrainer")
    options = parser.parse_args()
    config = Qwen3Config(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            options.out or folder,
            max_steps=options.steps,
            packing=True,
            max_length=512,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=True,
            logging_steps=5,
            save_steps=options.steps,
            include_num_input_tokens_seen="non_padding",
            report_to="none",
            disable_tqdm=True,
        )

        def made(kind: type[SFTTrainer]) -> SFTTrainer:
            set_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            tools = {"train_dataset": examples(), "processing_class": byte_tokenizer()}
            return kind(model, arguments, **tools)

        if options.compare:
            plain = made(SFTTrainer)
            seconds = plain.train().metrics["train_runtime"]
            before = plain.state.num_input_tokens_seen / seconds
        trainer = made(PackedSFTTrainer)
        with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
            now = trainer.train().metrics["packgraph/tokens_per_second"]
        if options.compare:
            print(f"{now / before:.2f} times as fast as without packgraph ({before:,.0f} tokens/s)")
        print(trainer.stats, trainer.packing, sep="\n")
        AutoModelForCausalLM.from_pretrained(f"{arguments.output_dir}/checkpoint-{options.steps}")
    assert options.eager or trainer.stats.replayed > 0
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
