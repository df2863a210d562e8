"""Where the tensors of a packed batch lie in its one buffer.

One buffer means one upload per microbatch and one copy into a graph's static memory. The layout
follows from the capacity alone, so two batches of equal capacity are the same bytes in the same
places.

    | tokens 8T | labels 8T | position_ids 8T | document_ids 4T | cu_seqlens 4(N+1) | loss_mask T | padding_mask T |

Every field starts at a multiple of `ALIGNMENT` bytes, so that each is a valid view and vector loads
are allowed.
"""  # noqa: E501

import functools
from dataclasses import dataclass

import torch

from packgraph.packing.capacity import Capacity

ALIGNMENT = 16


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: `length` elements of `dtype` from byte `start` on."""

    start: int
    length: int
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """First byte after the field."""
        return self.start + self.length * self.dtype.itemsize


@dataclass(frozen=True)
class BatchLayout:
    """All fields of a batch of one capacity; `nbytes` is the size of the buffer in bytes."""

    tokens: Field
    labels: Field
    position_ids: Field
    document_ids: Field
    cu_seqlens: Field
    loss_mask: Field
    padding_mask: Field
    nbytes: int


@functools.cache
def layout_of(capacity: Capacity) -> BatchLayout:
    """The layout of a batch of `capacity`."""
    start = 0
    fields: dict[str, Field] = {}
    for name, length, dtype in (
        ("tokens", capacity.tokens, torch.int64),
        ("labels", capacity.tokens, torch.int64),
        ("position_ids", capacity.tokens, torch.int64),
        ("document_ids", capacity.tokens, torch.int32),
        ("cu_seqlens", capacity.documents + 1, torch.int32),
        ("loss_mask", capacity.tokens, torch.bool),
        ("padding_mask", capacity.tokens, torch.bool),
    ):
        fields[name] = Field(start, length, dtype)
        start = -(-fields[name].stop // ALIGNMENT) * ALIGNMENT
    return BatchLayout(nbytes=start, **fields)
