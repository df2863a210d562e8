"""SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtype of the inputs."""
    return F.silu(gate) * up


def naive_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The specification: gate / (1 + exp(-gate)) * up."""
    return gate / (1.0 + torch.exp(-gate)) * up
