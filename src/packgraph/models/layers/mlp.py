"""Feed-forward layers, SwiGLU and one without a gate, and the RMSNorm that stands before them.

Weights are named as in Hugging Face checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.models.config import DecoderConfig
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.elementwise import rms_norm, swiglu
from packgraph.ops.linear import linear_layer, merged


class RMSNorm(nn.Module):
    """Normalise the last dimension ([..., size]) by its root mean square and scale it by
    `weight`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """[T, H] -> [T, H] through an intermediate width; projections named as in Hugging Face
    checkpoints. by: name of their product."""

    def __init__(self, hidden_size: int, intermediate_size: int, by: str) -> None:
        super().__init__()
        self.gate_proj = linear_layer(by, hidden_size, intermediate_size)
        self.up_proj = linear_layer(by, hidden_size, intermediate_size)
        self.offload: Mark = offload_block
        self.down_proj = linear_layer(by, intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        with self.offload("mlp_act"):
            return self.down_proj(swiglu(*merged(x, self.gate_proj, self.up_proj)))


class SquaredReluMLP(nn.Module):
    """[T, H] -> [T, H] through an intermediate width without a gate: down(relu(up(x)) ** 2), as in
    Nemotron-H.

    Source of the activation: So et al. 2021, arXiv:2109.08668.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, by: str) -> None:
        super().__init__()
        self.up_proj = linear_layer(by, hidden_size, intermediate_size)
        self.offload: Mark = offload_block
        self.down_proj = linear_layer(by, intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        with self.offload("mlp_act"):
            return self.down_proj(F.relu(self.up_proj(x)).square())


def feed_forward(config: DecoderConfig, width: int) -> GatedMLP | SquaredReluMLP:
    """A block of this intermediate width with the activation of `config`."""
    if config.activation == "relu2":
        return SquaredReluMLP(config.hidden_size, width, config.precision)
    return GatedMLP(config.hidden_size, width, config.precision)
