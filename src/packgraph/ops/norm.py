"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight.

Statistics are float32. torch's operation is one fused kernel on CUDA for equal dtypes; unequal
dtypes (autocast) go through the wider one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x [..., D] and scale by weight [D]. Returns x's shape and
    dtype."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), (x.shape[-1],), weight.to(dtype), eps).to(x.dtype)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification, as in Qwen3: statistics in float32, rounded to x's dtype before the
    weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)
