"""Train adapters of PEFT, on packed documents through graphs.

    python examples/peft_lora.py --steps 20

Two adapters of one model: the first is trained, then the second; a switch is noticed, and captured
again. Runs on a GPU, or in under a minute on a CPU. The data are Python's help pages as bytes, so
nothing is downloaded. `--eager` does the same without graphs; every loss is equal bit by bit.
"""

import argparse
import contextlib
import pydoc_data.topics
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import packgraph
from packgraph.integrations.transformers import packed

EOS = 256


def documents() -> list[list[int]]:
    """Paragraphs of help pages as bytes, each with its end."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return [[*text.encode(), EOS] for text in paragraphs if text.strip()]


def main() -> list[float]:
    """Train both adapters and save them; the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each adapter")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    base = AutoModelForCausalLM.from_config(config).to(device)
    places = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=16, target_modules=places), "plain")
    model.add_adapter("dora", LoraConfig(r=8, target_modules=places, use_dora=True))

    capacity = packgraph.Capacity(tokens=512, documents=16)
    packs = packgraph.pack(documents(), [capacity], overlong="split")
    graphed = packgraph.graph(packed(model), capacities=[capacity])
    losses = []
    with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
        for name in ("plain", "dora"):
            model.set_adapter(name)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
            for batch in packs[: options.steps]:
                loss = graphed(batch.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    print(graphed.stats)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        PeftModel.from_pretrained(base, f"{folder}/dora")
    assert options.eager or graphed.stats.replayed > 0
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
