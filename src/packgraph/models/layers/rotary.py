"""The rotary frequencies of a model: a float32 buffer that lives as long as the model.

A captured graph reads the buffer by its address, so it belongs to the model. Casting a model to
bfloat16 would round the frequencies and with them every position, so they are made anew whenever
the buffer would be converted or moved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.models.latent_config import RopeScaling
from packgraph.ops.rotary import inverse_frequencies, rotary_tables, stretched_frequencies


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions; `inv_freq` is float32 [head_dim / 2] and no part of the
    state_dict."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = RopeScaling() if scaling is None else scaling
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids: int [T]. Returns cos and sin, each [T, head_dim] of `dtype`."""
        return rotary_tables(position_ids, self.inv_freq, dtype, self.scaling.table_factor)

    def _frequencies(self) -> Tensor:
        scaling = self.scaling
        if not scaling.enabled:
            return inverse_frequencies(self.head_dim, self.theta)
        return stretched_frequencies(
            self.head_dim,
            self.theta,
            scaling.factor,
            scaling.original_positions,
            scaling.beta_fast,
            scaling.beta_slow,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq is not before:
            self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self
