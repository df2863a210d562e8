"""RMSNorm as a module: one weight per channel, named as in Hugging Face checkpoints."""

import torch
from torch import Tensor, nn

from packgraph.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """Normalise the last dimension ([..., size]) by its root mean square and scale it by
    `weight`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
