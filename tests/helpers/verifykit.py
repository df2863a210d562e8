"""Graphs that are made wrong on purpose, for tests of what finds differences between graphs and
eager training; and runs of one capacity, where shapes are none of a test's matter."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from packgraph.graphs.graphed import GraphedModule
from packgraph.packing.batch import PackedBatch
from packgraph.packing.pack import pack
from packgraph.train.build import build_model
from packgraph.train.config.sections import TrainConfig
from packgraph.verification.matrix import CAPACITIES, VOCABULARY, tiny_config

BROKEN = "norm.weight"


def one_capacity(config: TrainConfig) -> TrainConfig:
    """The same with graphs of the largest capacity alone, for `packs_of_one`."""
    return replace(config, graph=replace(config.graph, capacities=CAPACITIES[-1:]))


def packs_of_one(seed: int = 1) -> Iterator[PackedBatch]:
    """Endless packs of random documents in the largest capacity."""
    draw = random.Random(seed)
    while True:
        lengths = [draw.randint(2, CAPACITIES[-1].tokens // 4) for _ in range(4)]
        documents = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
        yield from pack(documents, [CAPACITIES[-1]])


def break_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on, graphs leave something behind in the gradient buffer of `BROKEN`."""
    original = GraphedModule.__call__

    def forward(self: GraphedModule, batch: PackedBatch, tokens: torch.Tensor) -> Any:
        result = original(self, batch, tokens)
        if self.stats.replayed == 1:
            dict(self.named_parameters())[BROKEN].grad.add_(1e-3)  # type: ignore[union-attr]
        return result

    assert BROKEN in dict(
        build_model(tiny_config("layer", 0.0, 1), torch.device("cpu")).named_parameters()
    )
    monkeypatch.setattr(GraphedModule, "__call__", forward)


def break_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays draw a number that eager training does not draw."""
    original = GraphedModule.__call__

    def forward(self: GraphedModule, *args: Any) -> Any:
        result = original(self, *args)
        if self.stats.replayed:
            torch.rand(1)
        return result

    monkeypatch.setattr(GraphedModule, "__call__", forward)
