"""A small model, and what every update rule has to keep to."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from trainkit import tiny

from packgraph.train.config.sections import TrainConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.spikes import Limits
from packgraph.train.updates import adamw


class Small(nn.Module):
    """An embedding, two matrices, a stack of three, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 30)
        self.up, self.norm, self.down = nn.Linear(30, 47), nn.LayerNorm(47), nn.Linear(47, 30)
        self.stack = nn.Parameter(torch.randn(3, 30, 8) / 5)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.down(self.norm(self.up(self.embed_tokens(ids))))
        mixed = torch.einsum("th,ehk->tk", hidden, self.stack)
        return self.lm_head(mixed).square().sum()  # type: ignore[no-any-return]


IDS = torch.arange(11)


@contextlib.contextmanager
def one_kernel() -> Iterator[mock.Mock]:
    """AdamW of bfloat16 weights that are made here is that of one kernel: here, without CUDA, its
    specification. What is yielded counts calls of that."""

    def narrow(parameters: Tensor) -> bool:
        return parameters.dtype != torch.float32

    with (
        mock.patch.object(adamw, "in_one_kernel", narrow),
        mock.patch.object(adamw, "naive_adamw", side_effect=adamw.naive_adamw) as calls,
    ):
        yield calls


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and state now."""
    state = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    return {name: value.detach().clone() for name, value in state.items()}


def ends_of_blocked_steps(optimizer: Optimizer, model: nn.Module) -> list[dict[str, Tensor]]:
    """After a good step, one with a NaN, one beyond a limit, and a good one."""
    optimizer.watch()
    ends = []
    for limit, spoiled in ((1e9, False), (1e9, True), (0.0, False), (1e9, False)):
        optimizer.set_limits(Limits(loss=limit))
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        if spoiled:
            optimizer.gradients()["up.weight"].fill_(float("nan"))
        optimizer.step(1e-2, loss.detach())
        ends.append(snapshot(model, optimizer))
    return ends


def losses(optimizer: Optimizer, model: nn.Module, rate: float, steps: int = 20) -> list[float]:
    """Of a few steps."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        optimizer.step(rate)
        found.append(loss.item())
    return found


def run_of(name: str, graph: bool = False, **run: Any) -> TrainConfig:
    """A tiny run with that optimizer."""
    config = tiny(graph=graph, **run)
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, name=name, clip_norm=1.0),  # type: ignore[arg-type]
    )
