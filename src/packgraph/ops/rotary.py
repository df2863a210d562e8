"""Rotary position embedding from positions on the device (Su et al. 2021, arXiv:2104.09864).

Half-rotation layout: column i turns with column i + D/2. Cosines and sines are computed once per microbatch
from its position_ids and shared by all layers; positions restart at every document, so packing changes no
number. `inv_freq` belongs to the model: a captured graph reads it, so it must live as long as the graph.
"""
import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta ** (-2i / head_dim) for i in 0 .. head_dim/2 - 1: float32 [head_dim / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (theta**exponents)


def rotary_tables(position_ids: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions: two [T, D] tensors of `dtype`, computed in float32.

    position_ids: int [T]; inv_freq: float32 [D/2].
    """
    angles = position_ids.to(torch.float32)[:, None] * inv_freq[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by the tables [T, D]; dtypes of q and k are kept."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def naive_apply_rotary(q: Tensor, k: Tensor, position_ids: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """The specification: columns (i, i + D/2) as complex numbers, turned by position * theta ** (-2i / D)."""

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        columns: list[Tensor] = [x[..., i] for i in range(x.shape[-1])]
        for i in range(half):
            angle = position_ids.to(torch.float64)[:, None] * theta ** (-2.0 * i / x.shape[-1])
            real, imaginary = x[..., i].double(), x[..., i + half].double()
            columns[i] = real * angle.cos() - imaginary * angle.sin()
            columns[i + half] = real * angle.sin() + imaginary * angle.cos()
        return torch.stack(columns, dim=-1).to(x.dtype)

    return rotate(q), rotate(k)
