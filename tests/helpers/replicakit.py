"""Own loops on several ranks: a model of packed batches, its steps, and what two runs must agree
on."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import packgraph
from packgraph.graphs.stages import Stage, run_stages

VOCAB, WIDTH = 23, 8
CAPACITY = packgraph.Capacity(tokens=24, documents=4)
COUNTS = ((2, 1), (1, 3), (2, 2), (1, 1))  # microbatches of even and odd ranks, step by step


class Layer(nn.Module):
    """A residual layer. It has a part that takes no part, and one that only some batches need."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.idle = nn.Linear(2, 2)

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = state["hidden"]
        return {**state, "hidden": hidden + self.down(F.silu(self.up(hidden)))}


class Tied(nn.Module):
    """Embedding, layers and a head that shares the embedding's matrix; the first layer is
    frozen."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)
        self.register_buffer("scale", torch.full((), 1.25))

    def begin(self, batch: packgraph.PackedBatch, tokens: torch.Tensor) -> dict[str, Any]:
        return {"batch": batch, "tokens": tokens}

    def run_embed(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "hidden": self.embed(state["batch"].tokens) * self.scale}

    def run_head(self, state: dict[str, Any]) -> dict[str, Any]:
        labels = state["batch"].labels
        losses = F.cross_entropy(
            self.head(state["hidden"]), labels, reduction="sum", ignore_index=-100
        )
        return {"loss": losses / state["tokens"]}

    def stages(self) -> list[Stage]:
        inner = [Stage("layer", number, layer.run) for number, layer in enumerate(self.layers)]
        end = len(self.layers)
        return [Stage("embed", -1, self.run_embed), *inner, Stage("head", end, self.run_head)]

    def end(self, state: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = state["loss"]
        return found

    def forward(self, batch: packgraph.PackedBatch, tokens: torch.Tensor) -> torch.Tensor:
        return run_stages(self, batch, tokens)


def microbatches(step: int, rank: int) -> list[packgraph.PackedBatch]:
    """Those of one rank in a step, each of two documents."""
    made = []
    for number in range(COUNTS[step % len(COUNTS)][rank % 2]):
        draw = torch.Generator().manual_seed(100 * step + 10 * rank + number)
        sizes = torch.randint(3, 11, (2,), generator=draw).tolist()
        documents = [torch.randint(VOCAB, (size,), generator=draw).tolist() for size in sizes]
        made.append(packgraph.PackedBatch.build(documents, CAPACITY))
    return made


def facts_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients (None where there is none) and parameters, copied."""
    named = dict(model.named_parameters())
    found = {f"gradient {n}": None if p.grad is None else p.grad.clone() for n, p in named.items()}
    return found | {f"parameter {n}": p.detach().clone() for n, p in named.items()}


def train(
    rank: int | None,
    *,
    steps: int = 4,
    eager: bool = False,
    set_to_none: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """A loop with `replicate`; rank None: one process that has all documents."""
    torch.manual_seed(5 if rank is None else 5 + rank)  # replicate makes them equal
    model = Tied()
    graphed: Any = packgraph.graph(model, capacities=[CAPACITY], warmup=1, **options)
    if rank is not None:
        graphed = packgraph.replicate(graphed, reduce="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    trace = []
    with packgraph.eager("comparison") if eager else contextlib.nullcontext():
        for step in range(steps):
            everyone = range(2) if rank is None else [rank]
            batches = [batch for some in everyone for batch in microbatches(step, some)]
            if rank is None:
                tokens = torch.tensor(sum(batch.num_loss_tokens for batch in batches))
            else:
                tokens = graphed.tokens_in_step(batches)
            for batch in batches[:-1]:
                with graphed.no_sync() if rank is not None else contextlib.nullcontext():
                    graphed(batch, tokens).backward()
            graphed(batches[-1], tokens).backward()
            facts = facts_of(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            trace.append(facts)
    return {"trace": trace, "replayed": graphed.stats.replayed}
