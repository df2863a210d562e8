"""Feed-forward layers, SwiGLU or without a gate, and the RMSNorm that stands before them.

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


class FeedForward(nn.Module):
    """[T, H] -> [T, H] through an intermediate width; projections named as in Hugging Face
    checkpoints.

    down(silu(gate(x)) * up(x)), or with the activation `relu2` down(relu(up(x)) ** 2), as in
    Nemotron-H (So et al. 2021, arXiv:2109.08668).
    """

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        hidden, by = config.hidden_size, config.precision
        is_gated = config.activation != "relu2"
        self.gate_proj = linear_layer(by, hidden, width) if is_gated else None
        self.up_proj = linear_layer(by, hidden, width)
        self.offload: Mark = offload_block
        self.down_proj = linear_layer(by, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        with self.offload("mlp_act"):
            if self.gate_proj is None:
                return self.down_proj(F.relu(self.up_proj(x)).square())
            return self.down_proj(swiglu(*merged(x, self.gate_proj, self.up_proj)))
