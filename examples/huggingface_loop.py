"""Train a model of transformers in a loop of one's own, on packed documents through graphs.

    python examples/huggingface_loop.py --steps 30 --out run

Runs on a GPU, or in under a minute on a CPU. The data are Python's help pages as bytes, so nothing
is downloaded. With weights of your own, put `AutoModelForCausalLM.from_pretrained(path)` in the
place of `from_config`, and token ids of its tokenizer in the place of bytes.
"""

import argparse
import itertools
import pydoc_data.topics
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import packgraph
from packgraph.integrations.transformers import packed

EOS = 256


def documents() -> list[list[int]]:
    """Paragraphs of help pages as bytes, each with its end."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return [[*text.encode(), EOS] for text in paragraphs if text.strip()]


def main() -> list[float]:
    """Train, save, and write a few words; the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=2, help="rows of each step")
    parser.add_argument("--out", help="folder for the weights; a temporary one by default")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )
    model = AutoModelForCausalLM.from_config(config).to(device)

    capacity = packgraph.Capacity(tokens=512, documents=16)
    packs = packgraph.pack(documents(), [capacity], overlong="split")
    graphed = packgraph.graph(packed(model), capacities=[capacity])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    rows = itertools.cycle(packs)
    for step in range(options.steps):
        batches = [next(rows).to(device) for _ in range(options.microbatches)]
        count = sum(batch.num_loss_tokens for batch in batches)
        tokens = torch.tensor(count, device=device)  # on the device: it differs from step to step
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = graphed(batch, tokens)  # two eager calls, then replays
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(graphed.stats)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(options.out or folder)
        again = AutoModelForCausalLM.from_pretrained(options.out or folder).to(device)
        prompt = torch.tensor([list(b"The ")], device=device)
        written = again.generate(prompt, max_new_tokens=40, do_sample=False)[0].tolist()
        print(repr(bytes(token for token in written if token != EOS).decode(errors="replace")))
    return losses


if __name__ == "__main__":
    main()
