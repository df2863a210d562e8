"""Attention over a packed batch for a user's own modules."""

from torch import Tensor

from packgraph.ops.attention.api import BACKENDS, attention, attention_metadata, choose_backend
from packgraph.packing.batch import PackedBatch


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention in which tokens see earlier tokens of their own document only.

    Can be captured: boundaries of documents are read on the device. Padding gives exact zeros, in
    the output and in the gradients, whatever its rows hold.

    Args:
        q: [T, Hq, D], floating point.
        k: [T, Hkv, D], where Hq is a multiple of Hkv; query head h reads key head
            h // (Hq / Hkv).
        v: [T, Hkv, Dv].
        batch: The packed batch that the rows belong to, on their device.
        scale: Factor on the scores. Defaults to D ** -0.5.
        backend: `flash` (flash-attn-4), `varlen` (torch's kernel for CUDA), `sdpa` or `naive`.
            `auto` takes the fastest that supports the device, dtype and sizes.

    Returns:
        [T, Hq, Dv].

    Raises:
        ValueError: If shapes do not fit together, or the backend is unknown or does not support
            them.

    Example:
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [packgraph.Capacity(8, 2)])
        >>> q = k = v = torch.randn(8, 2, 16)
        >>> out = packgraph.packed_attention(q, k, v, batch)
        >>> torch.equal(out[3], v[3]), out[5:].abs().sum().item()
        (True, 0.0)
    """
    if backend == "auto":
        backend = choose_backend(q.device, q.dtype, q.shape[-1], v.shape[-1]).name
    elif backend not in BACKENDS:
        raise ValueError(
            f"unknown attention backend {backend!r}: use auto or one of {', '.join(BACKENDS)}"
        )
    return attention(q, k, v, attention_metadata(batch, backend), scale=scale)
