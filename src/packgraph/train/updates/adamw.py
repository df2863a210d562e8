"""Fused AdamW (Loshchilov and Hutter 2019): two float32 running means of each element.

    narrower than float32, on CUDA   gradient, master, means ─▶ master, means, parameter
    all else                         clipped float32 copy | torch's AdamW | copy of the master

The first way is one kernel a span. The second one takes a few million elements at a time, so copies
are never those of all gradients.
Bits of the two differ in the last place: a run keeps to one of them, on the device or on the host.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.kernels import HAS_TRITON
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import Updated, UpdateRule, slices_of, write_parameters

MEANS = ("exp_avg", "exp_avg_sq")
BYTES = 8  # of state, of an element
# Over state and masters, as many bytes as norm, update and zeroing move in all, counted by dtype:
# 44 of 2 * 8, and 38 of 2 * 12 where gradients are float32.
PASSES = {"float32": 44 / 16, "bfloat16": 38 / 24}
GROUP = 2**24  # elements of a group: 64 MiB of float32, enough to fill a device


class AdamW(UpdateRule):
    """Updates of spans, each in one kernel, or of pieces of spans, in groups of which each is one
    kernel."""

    def __init__(
        self,
        updated: Sequence[Updated],
        config: OptimizerConfig,
        group: int = GROUP,
        done: Callable[[GradientBucket], None] = lambda span: None,
    ) -> None:
        """group: elements that are updated at a time. done: told of each span as soon as its
        parameters are new."""
        self._updated, self._config, self._done = list(updated), config, done
        are_narrow = [in_one_kernel(each.span.own_parameters) for each in self._updated]
        self._narrow = [n for n, narrow in enumerate(are_narrow) if narrow]
        self._wide = [e for e, narrow in zip(self._updated, are_narrow) if not narrow]
        self._groups = list(_groups(self._updated, group))
        self._means = [
            [torch.zeros_like(each.values) for each in self._updated] for _ in MEANS
        ]  # made here and not at the first step: a resumed run needs the places to load into

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """See `UpdateRule.step`."""
        if self._narrow:
            numbers = Numbers.of(learning_rate, steps, scale, blocked, self._config)
        for n in self._narrow:
            span, values = self._updated[n].span, self._updated[n].values
            narrow_adamw(
                span.own_parameters,
                span.own_gradients,
                values,
                self._means[0][n],
                self._means[1][n],
                numbers,
                self._config,
                decays=span.decays,
            )
            self._done(span)
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
        write_parameters(self._wide)
        for each in self._wide:
            self._done(each.span)

    def state_tensors(self) -> dict[str, Tensor]:
        """See `UpdateRule.state_tensors`; all of it is live."""
        found: dict[str, Tensor] = {}
        for number, each in enumerate(self._updated):
            for key, flats in zip(MEANS, self._means, strict=True):
                found |= each.named(key, flats[number])
        return found


def in_one_kernel(parameters: Tensor) -> bool:
    """Tells whether `narrow_adamw` updates these parameters."""
    return HAS_TRITON and parameters.is_cuda and parameters.dtype != torch.float32


def _groups(updated: Sequence[Updated], most: int) -> Iterator[list[tuple[int, slice]]]:
    """Numbers of other spans and pieces of them: at most so many elements, which all decay or do
    not."""
    for decays in (True, False):
        group, room = list[tuple[int, slice]](), most
        for number, each in enumerate(updated):
            if each.span.decays != decays or in_one_kernel(each.span.own_parameters):
                continue
            for part in slices_of(each.values.numel(), most):
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


class Numbers(NamedTuple):
    """Scalars of one update by `narrow_adamw`, float32 [1] each, made in float64: what gradients
    are multiplied by, weight decay times the rate, the rate over the mean's correction, the root of
    the squares' correction, and more than 0 if nothing is to change."""

    scale: Tensor
    decay: Tensor
    rate: Tensor
    root: Tensor
    blocked: Tensor

    @staticmethod
    def of(
        learning_rate: Tensor,
        steps: Tensor,
        scale: Tensor | None,
        blocked: Tensor | None,
        config: OptimizerConfig,
    ) -> "Numbers":
        """Computes them from the arguments of `UpdateRule.step`."""
        rate, ordinal, (beta1, beta2) = learning_rate.double(), steps.double() + 1, config.betas
        found = (
            torch.ones_like(rate) if scale is None else scale,
            rate * config.weight_decay,
            rate / (1 - beta1**ordinal),
            (1 - beta2**ordinal).sqrt(),
            torch.zeros_like(rate) if blocked is None else blocked,
        )
        return Numbers(*(value.float().view(1) for value in found))


def narrow_adamw(
    parameters: Tensor,
    gradients: Tensor,
    masters: Tensor,
    means: Tensor,
    squares: Tensor,
    numbers: Numbers,
    config: OptimizerConfig,
    *,
    decays: bool,
) -> None:
    """Update weights narrower than float32 once, in place, if not blocked.

    parameters, gradients: [size]; gradients of that dtype or float32. masters, means, squares:
    float32 [size]. On CUDA one kernel does it all, see `updates/adamw_kernel.py`.
    """
    if parameters.is_cuda:
        from packgraph.train.updates.adamw_kernel import kernel_adamw

        flats = parameters, gradients, masters, means, squares
        kernel_adamw(*flats, *numbers, *config.betas, config.eps, decays)
    else:
        naive_adamw(parameters, gradients, masters, means, squares, numbers, config, decays=decays)


def naive_adamw(
    parameters: Tensor,
    gradients: Tensor,
    masters: Tensor,
    means: Tensor,
    squares: Tensor,
    numbers: Numbers,
    config: OptimizerConfig,
    *,
    decays: bool,
) -> None:
    """The specification of `narrow_adamw`, by single operations."""
    beta1, beta2 = config.betas
    gradient = gradients * numbers.scale  # of one dimension, so the product is float32
    mean = beta1 * means + (1 - beta1) * gradient
    square = beta2 * squares + (1 - beta2) * gradient * gradient
    master = masters - numbers.decay * masters if decays else masters
    master = master - numbers.rate * mean / (square.sqrt() / numbers.root + config.eps)
    good = numbers.blocked == 0
    narrow = master.to(parameters.dtype)
    for old, new in (
        (parameters, narrow), (masters, master), (means, mean), (squares, square)
    ):  # fmt: skip
        old.copy_(torch.where(good, new, old))
