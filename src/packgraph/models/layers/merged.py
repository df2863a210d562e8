"""Projections of one input that are computed as one product where they can be."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packgraph.ops.linear import lay_side_by_side, merged_linear


class MergedProjections(nn.Module):
    """A module with linear layers of one input, without biases, named by `merged` in the order of
    registration.

    Their weights lie side by side in memory, in reverse: so flat buffers hold them, too
    (parallel/gradient_buckets.py). Products are formed one by one where weights are split over
    ranks, since DTensor places their inputs, and under autocast, which makes copies of weights.
    """

    merged: tuple[str, ...] = ()

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """x [T, H] through every layer of `merged`: [T, O_i] each, in that order."""
        layers = [getattr(self, name) for name in self.merged]
        if isinstance(layers[0].weight, DTensor) or torch.is_autocast_enabled(x.device.type):
            return [layer(x) for layer in layers]
        return merged_linear(x, [layer.weight for layer in reversed(layers)])[::-1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        weights = [getattr(self, name).weight for name in reversed(self.merged)]
        if weights and not isinstance(weights[0], DTensor):
            lay_side_by_side(weights)
        return self
