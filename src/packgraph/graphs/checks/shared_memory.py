"""Outputs that share memory with each other, or with what was there before the call.

Whoever changes such an output in place changes the other tensor, too. A replay hands out copies, so
it would not. What has a memory of its own, or is the same tensor in several places, is fine; so are
parts of one tensor that do not overlap (`chunk`, `split`).
"""

from collections.abc import Container, Sequence
from typing import Any

import torch

from packgraph.graphs.checks.host_sync import LEAVE_OUT
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.parameters import storage_of

_REMEDY = "return a copy (.clone()) in its place. " + LEAVE_OUT


def refuse_shared_memory(
    leaves: Sequence[Any], made: Container[int], captured: Container[int]
) -> None:
    """Raise CaptureError for outputs whose memory is not theirs alone.

    Args:
        leaves: The outputs of a call that is captured.
        made: Storages that captured code has made.
        captured: Identities of tensors that captured code returns. Others are handed through as
            they are, or made by eager code, which runs at every replay.
    """
    outputs = list(
        {
            id(leaf): leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel()
        }.values()
    )
    by_storage: dict[int, list[torch.Tensor]] = {}
    for output in outputs:
        storage = storage_of(output)
        if storage not in made and id(output) not in captured:
            continue
        if storage not in made:
            raise CaptureError(
                f"an output of shape {tuple(output.shape)} shares its memory with a tensor that "
                "was "
                "there before the call (an input, a parameter, a buffer): a replay returns a copy, "
                "and "
                "changes in place would not be seen through the other",
                user_line(),
                _REMEDY,
            )
        for other in by_storage.setdefault(storage, []):
            if _overlap(output, other):
                raise CaptureError(
                    f"two outputs, of shapes {tuple(other.shape)} and {tuple(output.shape)}, share "
                    "memory: a replay returns copies, and changes in place of one would not be "
                    "seen "
                    "through the other",
                    user_line(),
                    _REMEDY,
                )
        by_storage[storage].append(output)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one storage have an element in common."""
    (start, stop), (first, last) = _extent(one), _extent(other)
    if stop <= first or last <= start:
        return False
    if one.dtype != other.dtype:
        return True
    mask = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    mask.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) within the storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum(
        int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
