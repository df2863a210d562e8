"""Graphs that are made wrong on purpose, for tests of what finds differences between graphs and
eager training."""

from typing import Any

import pytest
import torch

from packgraph.graphs.graphed import GraphedModule
from packgraph.packing.batch import PackedBatch
from packgraph.train.build import build_model
from packgraph.verification.matrix import tiny_config

BROKEN = "norm.weight"


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
