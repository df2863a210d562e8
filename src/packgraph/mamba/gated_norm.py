"""RMSNorm of groups of channels together with a gate, as Mamba-2 has it before its last projection.

    norm(x * silu(gate)) * weight

Every group of D / groups channels has its own mean of squares (Zhang and Sennrich 2019,
arXiv:1910.07467; with a gate in the layer of Dao and Gu 2024, arXiv:2405.21060). Statistics are
float32. These are single operations, which torch.compile fuses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """Normalise x [..., D] times silu(gate) per group. Returns x's shape and dtype.

    gate: [..., D]; weight: [D]; groups must divide D. Everything is computed in float32 (float64 in
    float64) and rounded once. Raises ValueError if groups does not divide D.
    """
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"gated_rms_norm needs groups of equal size, got {groups} groups of {x.shape[-1]} "
            "channels"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = (x.to(wide) * F.silu(gate.to(wide))).unflatten(-1, (groups, -1))
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return ((grouped * scale).flatten(-2) * weight.to(wide)).to(x.dtype)


def naive_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1
) -> Tensor:
    """The specification, group by group."""
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide) * (gate.to(wide) / (1.0 + torch.exp(-gate.to(wide))))
    parts = [
        part / torch.sqrt((part * part).mean(-1, keepdim=True) + eps)
        for part in value.chunk(groups, dim=-1)
    ]
    return (torch.cat(parts, dim=-1) * weight.to(wide)).to(x.dtype)
