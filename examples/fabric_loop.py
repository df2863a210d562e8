"""Train a model of transformers with Lightning Fabric, on packed documents through graphs.

    python examples/fabric_loop.py --steps 20

`fabric.setup` takes the graphed module as it takes any other. Runs on a GPU, or in under a minute
on a CPU. The data are Python's help pages as bytes, so nothing is downloaded. `--eager` does the
same without graphs; every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile

import torch
from lightning_fabric import Fabric  # lightning.fabric is the same
from transformers import AutoModelForCausalLM, LlamaConfig

import packgraph
from packgraph.integrations.transformers import packed

EOS = 256


def documents() -> list[list[int]]:
    """Paragraphs of help pages as bytes, each with its end."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return [[*text.encode(), EOS] for text in paragraphs if text.strip()]


def main() -> list[float]:
    """Train and save; the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
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
    fabric = Fabric(devices=1, precision="bf16-mixed")
    fabric.launch()
    model = fabric.to_device(AutoModelForCausalLM.from_config(config))
    capacity = packgraph.Capacity(tokens=512, documents=16)
    graphed = packgraph.graph(packed(model), capacities=[capacity])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    module, optimizer = fabric.setup(graphed, optimizer)
    packs = packgraph.pack(documents(), [capacity], overlong="split")[: options.steps]
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(packs, batch_size=None))
    losses = []
    with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
        for batch in loader:
            loss = module(batch)
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    print(graphed.stats)
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(f"{folder}/state.ckpt", {"module": module, "optimizer": optimizer})
        fabric.load(f"{folder}/state.ckpt", {"module": module, "optimizer": optimizer})
        model.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
    assert options.eager or graphed.stats.replayed > 0
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
