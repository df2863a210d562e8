"""Fused AdamW (Loshchilov and Hutter 2019): two float32 running means of each element."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import Updated

MEANS = ("exp_avg", "exp_avg_sq")
BYTES = 8  # of state, of an element


class AdamW:
    """One kernel over all spans that decay, one over all others."""

    def __init__(self, updated: Sequence[Updated], config: OptimizerConfig) -> None:
        self._updated, self._config = list(updated), config
        self._means = [
            [torch.zeros_like(each.values) for each in self._updated] for _ in MEANS
        ]  # made here and not at the first step: a resumed run needs the places to load into

    @torch.no_grad()
    def step(self, learning_rate: Tensor, steps: Tensor, blocked: Tensor | None) -> None:
        """As `UpdateRule.step`."""
        for decays in (True, False):
            chosen = [n for n, each in enumerate(self._updated) if each.span.decays == decays]
            if chosen:
                fused_adamw(
                    [self._updated[n].values for n in chosen],
                    [self._updated[n].gradient for n in chosen],
                    [self._means[0][n] for n in chosen],
                    [self._means[1][n] for n in chosen],
                    self._config,
                    learning_rate,
                    steps,
                    blocked,
                    decays=decays,
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """As `UpdateRule.state_tensors`, all of it live."""
        found: dict[str, Tensor] = {}
        for number, each in enumerate(self._updated):
            for key, flats in zip(MEANS, self._means, strict=True):
                found |= each.named(key, flats[number])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing: they are live."""


def fused_adamw(
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    config: OptimizerConfig,
    learning_rate: Tensor,
    steps: Tensor,
    blocked: Tensor | None,
    *,
    decays: bool,
) -> None:
    """Update float32 (or narrower) `values` once, in place. steps: updates so far; not changed."""
    adamw(
        values,
        gradients,
        means,
        squares,
        [],
        list(steps.expand(len(values)).clone().unbind()),
        fused=True,
        capturable=steps.is_cuda,
        found_inf=blocked,
        amsgrad=False,
        beta1=config.betas[0],
        beta2=config.betas[1],
        lr=learning_rate,
        weight_decay=config.weight_decay if decays else 0.0,
        eps=config.eps,
        maximize=False,
    )
