"""A staged model of packed batches with next to no operations, for tests that compile: torch traces
it in no time."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from packgraph.graphs.stages import Stage, State, run_stages
from packgraph.packing.batch import PackedBatch

WORDS, WIDTH = 320, 8


class Layer(nn.Module):
    """Two stages that are methods of a module, so all layers share their code; with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.dropout = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            dropout,
        )

    def mix(self, state: State) -> State:
        out = functional.dropout(self.first(state["hidden"]), self.dropout, self.training)
        return {**state, "hidden": state["hidden"] + out}

    def bend(self, state: State) -> State:
        return {**state, "hidden": state["hidden"] + self.second(state["hidden"]).tanh()}


class Packed(nn.Module):
    """Embedding, layers, head and the mean loss of all places; a batch of tokens [T] to float32 [].

    tied: the head multiplies with the matrix of the embedding, which two pieces of code use then.
    """

    def __init__(self, layers: int = 2, dropout: float = 0.1, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        torch.manual_seed(5)
        self.embedding, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def begin(self, batch: PackedBatch) -> State:
        return {"batch": batch}

    def stages(self) -> list[Stage]:
        made: list[Any] = list(self.layers)
        layers = [
            Stage(name, number, run)
            for number, layer in enumerate(made)
            for name, run in (("attn", layer.mix), ("mlp", layer.bend))
        ]
        return [Stage("embed", -1, self.embed), *layers, Stage("head", len(made), self.head)]

    def embed(self, state: State) -> State:
        return {**state, "hidden": self.embedding(state["batch"].tokens)}

    def head(self, state: State) -> State:
        logits = (
            state["hidden"] @ self.embedding.weight.T if self.tied else self.linear(state["hidden"])
        )
        return {"loss": functional.cross_entropy(logits, state["batch"].tokens.long())}

    def end(self, state: State) -> Tensor:
        return state["loss"]

    def forward(self, batch: PackedBatch) -> Tensor:
        return run_stages(self, batch)
