"""Rectangles of a tensor that a rank holds, in a form that torch.distributed.checkpoint saves and
loads.

A rank's part of the optimizer state is a range of flattened elements; of a matrix that is up to
three rectangles:

    . . . . # #      end of the first row
    # # # # # #      whole rows
    # # # . . .      start of the last row

The invariant: a checkpoint holds every tensor under its full name and in its full shape, and
nothing of the layout it was saved in; so it can be read in any other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
_MARK = "packgraph_expert_part"


@dataclass(frozen=True)
class ExpertPart:
    """Where a parameter of some experts lies in the stack of all of a layer. shape: of the stack
    [E, ...]."""

    shape: torch.Size
    offsets: tuple[int, ...]


def mark_experts(parameter: nn.Parameter, part: ExpertPart) -> None:
    """Say that `parameter` is part of a stack of experts, of which other ranks hold other parts,
    not copies."""
    setattr(parameter, _MARK, part)


def expert_part(parameter: Tensor) -> ExpertPart | None:
    """What `mark_experts` has said, None for a parameter of which every replica has a copy."""
    found: ExpertPart | None = getattr(parameter, _MARK, None)
    return found


def stored(
    tensors: Mapping[str, Tensor], parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """`tensors` (a state_dict) as checkpoints hold them: parts of stacks of experts as `Pieces` of
    the stacks.

    parameters: the model's, by the same names. The memory is shared.
    """
    parts = {
        name: part for name, parameter in parameters if (part := expert_part(parameter)) is not None
    }
    return {
        name: tensor
        if name not in parts
        else Pieces(parts[name].shape, tensor.dtype, [(parts[name].offsets, tensor.detach())])
        for name, tensor in tensors.items()
    }


def rectangles(start: int, stop: int, shape: Sequence[int]) -> list[Rectangle]:
    """Offsets and sizes of the rectangles that make up the flat elements start .. stop of `shape`,
    in their order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first .. last
    if first > last:
        return _inside(start // row, start % row, stop % row, inner)
    found = _inside(start // row, start % row, row, inner) if start % row else []
    if first < last:
        found.append(((first,) + (0,) * len(inner), (last - first, *inner)))
    return found + (_inside(last, 0, stop % row, inner) if stop % row else [])


def _inside(row: int, start: int, stop: int, inner: tuple[int, ...]) -> list[Rectangle]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in rectangles(start, stop, inner)]


class Pieces(Tensor):
    """A tensor of the whole model, of which this rank holds some rectangles; only good for
    checkpoints.

    pieces: offsets in the whole and the live memory, for each rectangle.
    """

    pieces: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], Tensor]]
    ) -> "Pieces":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, pieces: list[tuple[tuple[int, ...], Tensor]]
    ) -> None:
        self.pieces = pieces

    @staticmethod
    def of_flat(
        flat: Tensor,
        start: int,
        local_shape: Sequence[int],
        shape: torch.Size,
        offsets: Sequence[int],
    ) -> "Pieces":
        """flat: elements from `start` on of a row-major part [local_shape], which lies at `offsets`
        of [shape]."""
        pieces, position = [], 0
        for corner, sizes in rectangles(start, start + flat.numel(), local_shape):
            count = math.prod(sizes)
            place = tuple(a + b for a, b in zip(corner, offsets, strict=True))
            pieces.append((place, flat[position : position + count].view(sizes)))
            position += count
        return Pieces(shape, flat.dtype, pieces)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        raise RuntimeError(
            f"{function}: pieces of a tensor can be saved and loaded, not computed with"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {len(self.pieces)} held here)"

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for chunk, (_, piece) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), piece.size())
            for offsets, piece in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece for offsets, piece in self.pieces if index.offset == torch.Size(offsets))
