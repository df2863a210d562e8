"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) through graphs.

    python examples/dpo.py --steps 30
    python examples/dpo.py --data preferences.jsonl      # `chosen` and `rejected`, as TRL has them

Both answers of a preference lie in one pack, as two documents. The policy's log-probabilities
(with gradients) and those of the frozen reference (without) replay graphs. The task is a toy:
prefer the friendly answer. Runs on a GPU, or in under a minute on a CPU. `--eager` does the same
without graphs; every loss is equal bit by bit.
"""

import argparse
import contextlib
import copy
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import packgraph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.document import Document
from packgraph.train.data import DataConfig, build_tokenizer, open_documents

CAPACITY = packgraph.Capacity(tokens=512, documents=16)
BETA = 0.1  # how dear it is to leave the reference
Pair = tuple[Document, Document]  # chosen, rejected


def toy(path: Path, rows: int) -> None:
    """Write preferences: which digit did I say?"""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            digit = draw.choice("0123456789")
            prompt = f"{'well, ' * draw.randrange(3)}I said {digit}. Which?"
            row = {
                "prompt": prompt,
                "chosen": f" Gladly: {digit}, I think.",
                "rejected": f" Ugh. {digit}.",
            }
            print(json.dumps(row), file=file)


def pairs_of(config: DataConfig) -> list[Pair]:
    """All preferences, tokenized; of each document only the answer has labels."""
    tokenizer, found = build_tokenizer(config), []
    documents = open_documents(config)
    for document in (documents[index] for index in range(len(documents))):
        if document.rejected is None:
            raise SystemExit(f"{document.where}: needs `chosen` and `rejected`")
        (chosen,), (rejected,) = map(tokenizer.encode, (document, document.rejected))
        found.append((chosen, rejected))
    return found


def packs(pairs: list[Pair], draw: random.Random) -> Iterator[packgraph.PackedBatch]:
    """Packs of whole pairs, epoch after epoch in new orders: documents 0 and 1 are a pair."""
    waiting: list[Document] = []
    while True:
        for pair in draw.sample(pairs, len(pairs)):
            both = [*waiting, *pair]
            if not CAPACITY.holds(sum(map(len, both)), len(both), max(map(len, both))):
                if not waiting:
                    raise SystemExit(f"a pair of {sum(map(len, pair))} tokens: raise CAPACITY")
                yield packgraph.PackedBatch.build(waiting, CAPACITY)
                both = list(pair)
            waiting = both


def by_document(values: Tensor, batch: packgraph.PackedBatch) -> Tensor:
    """Sums [pairs, 2] of float32 [T]. A product and not `index_add`, whose order may change."""
    count = CAPACITY.documents + 1  # padding belongs to a document behind the last
    members = functional.one_hot(batch.document_ids.long(), count).to(values.dtype)
    return (values @ members)[:-1].view(-1, 2)


def loss_of(policy: Tensor, reference: Tensor, batch: packgraph.PackedBatch) -> tuple[Tensor, ...]:
    """Loss, share of pairs whose chosen answer gained more, and by how much, in nats."""
    gains = by_document(policy - reference, batch)
    margins = BETA * (gains[:, 0] - gains[:, 1])
    pairs = torch.arange(len(margins), device=margins.device) < batch.num_documents // 2
    losses = torch.where(pairs, -functional.logsigmoid(margins), 0.0)
    right, count = (margins > 0) & pairs, pairs.sum()
    return losses.sum() / count, right.sum() / count, (margins * pairs).sum() / count


def train(options: argparse.Namespace, pairs: list[Pair]) -> list[tuple[float, float, float]]:
    """Loss, accuracy and margin of every step."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = DecoderConfig(
        vocab_size=264,  # of the byte tokenizer
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    model = DecoderModel(config, device=device)
    frozen = copy.deepcopy(model).requires_grad_(False)
    policy = packgraph.graph(model, capacities=[CAPACITY], warmup=1)
    reference = packgraph.graph(frozen, capacities=[CAPACITY], warmup=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    found, source = [], packs(pairs, random.Random(1))
    for _ in range(options.steps):
        batch = next(source).to(device)
        with torch.no_grad():
            before = packgraph.logprobs(reference, batch)
        now = packgraph.logprobs(policy, batch)
        assert isinstance(now, Tensor) and isinstance(before, Tensor)
        loss, accuracy, margin = loss_of(now, before, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(accuracy), float(margin.detach())))
    print(policy.stats)
    print(reference.stats)
    return found


def main() -> list[tuple[float, float, float]]:
    """Train on preferences of a file, or of the toy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="lines of JSON with `chosen` and `rejected`")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.data or str(Path(folder) / "toy.jsonl")
        if options.data is None:
            toy(Path(path), 200)
        pairs = pairs_of(DataConfig(source="jsonl", path=path))
    with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
        found = train(options, pairs)
    print(
        "loss {:.3f} -> {:.3f}, accuracy {:.2f} -> {:.2f}, margin {:.3f} -> {:.3f}".format(
            *(value for both in zip(found[0], found[-1], strict=True) for value in both)
        )
    )
    return found


if __name__ == "__main__":
    main()
