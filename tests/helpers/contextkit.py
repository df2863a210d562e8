"""Rows that are spread over ranks: packs of them, calls over changing numbers of ranks, and
documents of heavy-tailed lengths for planned steps, read by number."""

import random

import numpy as np
import pytest
import torch
from trainkit import RandomPacks

from packgraph.graphs.graphed import graph
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.packing.pack import pack
from packgraph.train.data.files import OpenedFiles
from packgraph.train.data.source import SourceDocument
from packgraph.train.metrics import METRICS, read_metrics

SPREAD = {
    "ulysses": (Capacity(32, 8), Capacity(64, 64)),
    "zigzag": (Capacity(32, 4), Capacity(64, 8)),
}
PLACES = 8  # what documents that are cut take up multiples of: with four ranks, and so with two


class SpreadPacks(RandomPacks):
    """Rows of one capacity after the other: one document over all ranks, tiny ones, ranks with
    padding only, and what comes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __next__(self):
        draw = random.Random(self.position)
        capacity = SPREAD[self.kind][self.position // 2 % 2]
        most = capacity.tokens // 4
        if self.kind == "ulysses":
            kinds = (
                [capacity.tokens],
                [1, *[2] * (capacity.documents // 2 - 1)],
                [5, 3],
                [draw.randint(2, most) for _ in range(3)] + [most],
            )
        else:
            kinds = (
                [capacity.tokens - 3],
                [2] * (capacity.tokens // PLACES - 1),
                [1, 5],
                [draw.randint(2, most) for _ in range(2)] + [most + 3],
            )
        lengths = kinds[self.position * 3 // 2 % 4]
        self.position += 1
        documents = [[draw.randrange(32) for _ in range(length)] for length in lengths]
        (made,) = pack(documents, [capacity], multiple=PLACES if self.kind == "zigzag" else 1)
        return made


def equal_metrics(folder, other):
    """The same losses, gradient norms and counts in every step of two runs, up to rounding."""
    for ours, theirs in zip(
        read_metrics(folder / METRICS), read_metrics(other / METRICS), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert (ours["tokens"], ours["places"]) == (theirs["tokens"], theirs["places"])


def switched(mesh, model, capacities, batches, graphs):
    """Losses and gradients of microbatches whose rows are spread over another number of ranks each
    time, and captures, replays and fallbacks. The number is a constant of the call."""
    call = (
        graph(model, capacities=capacities, granularity="chunk", strict=True, warmup=2)
        if graphs
        else model
    )
    trace = []
    torch.manual_seed(mesh.rank)
    for number, batch in enumerate(batches):
        loss = call(batch, None, None, (1, 2, 2, 1)[number % 4])
        loss.backward()
        trace += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    if not graphs:
        return trace, None
    counts = call.stats.captured, call.stats.replayed, dict(call.stats.fallbacks)
    call.close()
    return trace, counts


class Source(OpenedFiles):
    """Documents of heavy-tailed lengths: number n depends on n alone. One fills the largest row to
    its last token."""

    def __init__(self, longest, count=400):
        super().__init__()
        draw = np.random.default_rng(longest)
        self.lengths = np.minimum(
            longest, np.maximum(2, draw.lognormal(2.0, 1.2, count).astype(int))
        )
        self.lengths[7], self.lengths[8:20] = longest, 2

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return SourceDocument(f"document {index}", text=str(index))


class Tokens:
    """Reads the numbers that `Source` gives as documents."""

    fingerprint, vocab_size = "numbers", 32

    def __init__(self, source):
        self.source = source

    def encode(self, document):
        index = int(document.text)
        tokens = np.random.default_rng(index).integers(32, size=self.source.lengths[index])
        return [Document(tokens)]
