"""An experiment: attention within documents by flash-attn-4 over one sequence, with lists of blocks
to compute.

The varlen kernels launch blocks for every place for a document, filled or not: the static tax. Here
the row is one sequence of T tokens cut into blocks of 128, and lists made on the device say which
pairs of blocks to compute: all of a pair (`full`), or what a function of row and column allows
(`partial`: the diagonal, and where a document begins). Their shapes follow from T alone, so the
number of documents costs nothing. One set of lists per microbatch, for all layers.

    columns   0 1 2 3
    rows 0    p            p partial, f full, . skipped; documents begin at 0 and within block 2
         1    f p
         2    p p p
         3    . . p p
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128


class Lists(NamedTuple):
    """counts int32 [1, 1, R] and block numbers int32 [1, 1, R, C], ascending, of partial and of
    full blocks."""

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


class Blocks(NamedTuple):
    """starts: int32 [T], the first row that each row sees. forward: lists by rows; backward: lists
    by columns."""

    starts: Tensor
    forward: Lists
    backward: Lists


def make_blocks(cu_seqlens: Tensor, tokens: int) -> Blocks:
    """The blocks of a microbatch; a row of padding sees itself alone. Device operations of static
    shape only."""
    rows = torch.arange(tokens, device=cu_seqlens.device, dtype=torch.int32)
    place = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    starts = torch.where(
        rows < cu_seqlens[-1], cu_seqlens[place.clamp(max=cu_seqlens.shape[0] - 1)], rows
    ).int()
    count = -(-tokens // BLOCK)
    numbers = torch.arange(count, device=rows.device, dtype=torch.int32)
    first = starts[numbers * BLOCK]
    last = starts[((numbers + 1) * BLOCK - 1).clamp(max=tokens - 1)]
    column = numbers[None, :]
    seen = (column >= first[:, None] // BLOCK) & (column <= numbers[:, None])
    full = seen & (column < numbers[:, None]) & (last[:, None] <= column * BLOCK)
    partial = seen & ~full
    return Blocks(starts, _lists(partial, full), _lists(partial.t(), full.t()))


def _lists(partial: Tensor, full: Tensor) -> Lists:
    found = []
    for chosen in (partial, full):
        numbers = torch.arange(chosen.shape[1], device=chosen.device, dtype=torch.int32).expand(
            chosen.shape
        )
        ordered = (
            torch.where(chosen, numbers, chosen.shape[1])
            .sort(dim=1)
            .values.clamp(max=chosen.shape[1] - 1)
        )
        found += [
            chosen.sum(1, dtype=torch.int32)[None, None],
            ordered.int()[None, None].contiguous(),
        ]
    return Lists(*found)


def kernels() -> tuple[Any, Any, Any]:
    """(forward, backward, the function of row and column) of flash-attn-4. Raises ImportError where
    there is none."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import interface, utils

    @cute.jit
    def in_document(batch, head, row, column, lengths, tensors):  # type: ignore[no-untyped-def]
        start = utils.scalar_to_ssa(tensors[0][row[0]], cutlass.Int32)
        return (column >= start) & (column <= row)

    return interface._flash_attn_fwd, interface._flash_attn_bwd, in_document


def attend_by_blocks(
    functions: tuple[Any, Any, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks,
    grad: Tensor | None,
) -> list[Tensor]:
    """Output, and with `grad` the gradients of q, k and v ([T, heads, D] each)."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    forward, backward, in_document = functions
    one = [x.unsqueeze(0) for x in (q, k, v)]
    shared = {
        "mask_mod": in_document,
        "aux_tensors": [blocks.starts],
        "softmax_scale": q.shape[-1] ** -0.5,
    }
    # Grouped queries packed into one tile would share rows of the mask.
    lists = BlockSparseTensorsTorch(*blocks.forward, block_size=(BLOCK, BLOCK))
    out, lse, *_ = forward(
        *one, return_lse=True, pack_gqa=False, block_sparse_tensors=lists, **shared
    )
    if grad is None:
        return [out[0]]
    lists = BlockSparseTensorsTorch(*blocks.backward, block_size=(BLOCK, BLOCK))
    found = backward(
        *one, out, grad.unsqueeze(0).contiguous(), lse, block_sparse_tensors=lists, **shared
    )
    return [out[0], *(x[0] for x in found[:3])]
