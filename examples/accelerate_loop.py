"""Train a model of transformers in a loop of Accelerate, on packed documents through graphs.

    python examples/accelerate_loop.py --steps 20

Runs on a GPU, or in under a minute on a CPU. The data are Python's help pages as bytes, so nothing
is downloaded. `--eager` does the same without graphs; every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig

import packgraph
from packgraph.integrations.accelerate import prepare
from packgraph.integrations.transformers import packed

EOS = 256


def documents() -> list[list[int]]:
    """Paragraphs of help pages as bytes, each with its end."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return [[*text.encode(), EOS] for text in paragraphs if text.strip()]


def main() -> list[float]:
    """Train and save; the losses of all microbatches."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="microbatches")
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
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = AutoModelForCausalLM.from_config(config)
    capacity = packgraph.Capacity(tokens=512, documents=16)
    module = prepare(accelerator, packed(model), capacities=[capacity])
    packs = packgraph.pack(documents(), [capacity], overlong="split")[: options.steps]
    optimizer, loader = accelerator.prepare(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        torch.utils.data.DataLoader(packs, batch_size=None),
    )
    losses = []
    with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
        for batch in loader:
            with accelerator.accumulate(module):
                loss = module(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    print(module.stats)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        model.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
    assert options.eager or module.stats.replayed > 0
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
