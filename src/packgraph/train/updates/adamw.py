"""Fused AdamW (Loshchilov and Hutter 2019): two float32 running means of each element."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import Updated, slices_of

MEANS = ("exp_avg", "exp_avg_sq")
BYTES = 8  # of state, of an element
PASSES = 2  # over state and masters, as many bytes as an update moves in all, counted
GROUP = 2**24  # elements of a group: 64 MiB of float32, enough to fill a device


class AdamW:
    """Updates of pieces of spans, in groups of which each is one kernel."""

    def __init__(
        self, updated: Sequence[Updated], config: OptimizerConfig, group: int = GROUP
    ) -> None:
        """group: elements that are updated at a time."""
        self._updated, self._config = list(updated), config
        self._groups = list(_groups(self._updated, group))
        self._means = [
            [torch.zeros_like(each.values) for each in self._updated] for _ in MEANS
        ]  # made here and not at the first step: a resumed run needs the places to load into

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """As `UpdateRule.step`."""
        ordinal = steps + 1
        for group in self._groups:
            fused_adamw(
                [self._updated[n].values[part] for n, part in group],
                [self._updated[n].gradient(part, scale) for n, part in group],
                [self._means[0][n][part] for n, part in group],
                [self._means[1][n][part] for n, part in group],
                self._config,
                learning_rate,
                ordinal,
                blocked,
                decays=self._updated[group[0][0]].span.decays,
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


def _groups(updated: Sequence[Updated], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Numbers of spans and pieces of them: at most so many elements, which all decay or do not."""
    for decays in (True, False):
        group, room = list[tuple[int, slice]](), most
        for number, each in enumerate(updated):
            parts = slices_of(each.values.numel(), most) if each.span.decays == decays else ()
            for part in parts:
                if (size := part.stop - part.start) > room:
                    yield group
                    group, room = [], most
                group.append((number, part))
                room -= size
        if group:
            yield group


def fused_adamw(
    values: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    config: OptimizerConfig,
    learning_rate: Tensor,
    ordinal: Tensor,
    blocked: Tensor | None,
    *,
    decays: bool,
) -> None:
    """Update float32 `values` once, in place. ordinal: of this update, from 1, float32 []."""
    torch._fused_adamw_(
        values,
        gradients,
        means,
        squares,
        [],
        [ordinal] * len(values),
        lr=learning_rate,
        beta1=config.betas[0],
        beta2=config.betas[1],
        weight_decay=config.weight_decay if decays else 0.0,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        found_inf=blocked,
    )
