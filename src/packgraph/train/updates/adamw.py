"""Fused AdamW (Loshchilov and Hutter 2019): two float32 running means of each element.

    narrower than float32, on CUDA   gradient, master, means ─▶ master, means, parameter
    all else                         clipped float32 copy | torch's AdamW | copy of the master

The first way is one kernel a span. The second one takes a few million elements at a time, so copies
are never those of all gradients.
Bits of the two differ in the last place: a run keeps to one of them, on the device or on the host.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.kernels import HAS_TRITON
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.torch_internals import adamw_of_torch
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import Updated, UpdateRule, clipped, slices_of

MEANS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
BYTES = 8  # of state, of an element
# Over state and masters, as many bytes as norm, update and zeroing move in all, counted by dtype:
# 44 of 2 * 8, and 38 of 2 * 12 where gradients are float32.
PASSES = {"float32": 44 / 16, "bfloat16": 38 / 24}
GROUP = 2**24  # elements: 64 MiB of float32, enough to fill a device

Update = Callable[[GradientBucket, slice, Mapping[str, Tensor]], None]


class AdamW(UpdateRule):
    """Updates of spans, each in one kernel or piece by piece."""

    def __init__(
        self,
        updated: Sequence[Updated],
        config: OptimizerConfig,
        group: int = GROUP,
        done: Callable[[GradientBucket], None] = lambda span: None,
    ) -> None:
        """group: elements that are updated at a time, where one kernel does not do it all. done:
        told of each span as soon as its parameters are new."""
        super().__init__(updated, MEANS)
        self._config, self._group, self._done = config, group, done

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """See `UpdateRule.step`."""
        spans = [each.span for each in self.updated]
        update = update_of(self._config, spans, learning_rate, steps, scale, blocked)
        for number, each in enumerate(self.updated):
            flats = {MASTER: each.values, **{key: self.state[key][number] for key in MEANS}}
            size = each.values.numel()
            whole = in_one_kernel(each.span.own_parameters)
            for part in slices_of(size, max(size, self._group) if whole else self._group):
                update(each.span, part, {key: flat[part] for key, flat in flats.items()})
            self._done(each.span)


def update_of(
    config: OptimizerConfig,
    spans: Sequence[GradientBucket],
    learning_rate: Tensor,
    steps: Tensor,
    scale: Tensor | None,
    blocked: Tensor | None,
) -> Update:
    """Returns the update of a part of this rank's own part of one of `spans`, whose state is in
    given tensors. Arguments are those of `UpdateRule.step`."""
    narrow = any(in_one_kernel(span.own_parameters) for span in spans)
    numbers = Numbers.of(learning_rate, steps, scale, blocked, config) if narrow else None
    ordinal = steps + 1

    def update(span: GradientBucket, part: slice, state: Mapping[str, Tensor]) -> None:
        weight, gradient = span.own_parameters[part], span.own_gradients[part]
        wide = weight.dtype == torch.float32
        master, (mean, square) = weight if wide else state[MASTER], (state[key] for key in MEANS)
        if numbers is not None and in_one_kernel(weight):
            flats = weight, gradient, master, mean, square
            narrow_adamw(*flats, numbers, config, decays=span.decays)
            return
        lists = [master], [clipped(gradient, scale)], [mean], [square]
        fused_adamw(*lists, config, learning_rate, ordinal, blocked, decays=span.decays)
        if not wide:
            weight.copy_(master)

    return update


def in_one_kernel(parameters: Tensor) -> bool:
    """Tells whether `narrow_adamw` updates these parameters."""
    return HAS_TRITON and parameters.is_cuda and parameters.dtype != torch.float32


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
    adamw_of_torch(
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
