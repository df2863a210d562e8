"""Rows of padding set to zero, where they are.

    attention kernel ──▶ rows of documents | rows of padding, unwritten ──▶ zeros

The kernels of attention leave rows of padding unwritten. A masked copy of what they wrote would
read and write all of it again for the sake of a few rows; on CUDA a kernel of Triton reads the mask
and writes rows of padding alone. Its bits are those of `naive_clear_rows`.
"""

from collections.abc import Sequence

from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON


def clear_rows(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Set rows of each of at most three tensors to zero where its mask says so, in place.

    Args:
        tensors: [T, ...] each, of any dtype and lengths of their own.
        masks: bool [T] for each, True where a row is cleared.
    """
    whole = all(x[:1].is_contiguous() for x in tensors) and all(m.is_contiguous() for m in masks)
    if HAS_TRITON and whole and all(x.is_cuda for x in tensors):
        from packgraph.ops.attention.clear_rows_kernel import clear

        clear(tensors, masks)
        return
    for x, mask in zip(tensors, masks, strict=True):
        x.copy_(naive_clear_rows(x, mask))


def naive_clear_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The specification: a new tensor, nothing is written."""
    return x.masked_fill(mask.view(-1, *[1] * (x.dim() - 1)), 0)
