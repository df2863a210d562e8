"""RMSNorm of groups of channels together with a gate, as Mamba-2 has it before its last projection.

    gate first    norm(x * silu(gate)) * weight        norm first    norm(x) * weight * silu(gate)

Every group of D / groups channels has its own mean of squares (Zhang and Sennrich 2019,
arXiv:1910.07467; with a gate in the layer of Dao and Gu 2024, arXiv:2405.21060). Statistics are
float32. These are single operations, which torch.compile fuses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int = 1,
    *,
    norm_first: bool = False,
) -> Tensor:
    """Normalise x [..., D] per group, with silu(gate) before or after. Returns x's shape and dtype.

    gate: [..., D]; weight: [D]; groups must divide D. Everything is computed in float32 (float64 in
    float64) and rounded once. Raises ValueError if groups does not divide D.
    """
    if groups < 1 or x.shape[-1] % groups:
        raise ValueError(
            f"gated_rms_norm needs groups of equal size, got {groups} groups of {x.shape[-1]} "
            "channels"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    value, opening = x.to(wide), F.silu(gate.to(wide))
    if not norm_first:
        value = value * opening
    grouped = value.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    normed = (grouped * scale).flatten(-2) * weight.to(wide)
    return (normed * opening if norm_first else normed).to(x.dtype)


def naive_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int = 1,
    *,
    norm_first: bool = False,
) -> Tensor:
    """The specification, group by group."""
    wide = torch.promote_types(x.dtype, torch.float32)
    opening = gate.to(wide) / (1.0 + torch.exp(-gate.to(wide)))
    value = x.to(wide) if norm_first else x.to(wide) * opening
    parts = [
        part / torch.sqrt((part * part).mean(-1, keepdim=True) + eps)
        for part in value.chunk(groups, dim=-1)
    ]
    normed = torch.cat(parts, dim=-1) * weight.to(wide)
    return (normed * opening if norm_first else normed).to(x.dtype)
