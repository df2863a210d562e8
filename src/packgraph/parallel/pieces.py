"""Rectangles of a tensor that a rank holds, in a form that torch.distributed.checkpoint saves and
loads, and whole tensors put together from them.

A rank's part of the optimizer state is a range of flattened elements; of a matrix that is up to
three rectangles:

    . . . . # #      end of the first row
    # # # # # #      whole rows
    # # # . . .      start of the last row

The invariant: a checkpoint holds every tensor under its full name and in its full shape, and
nothing of the layout it was saved in; so it can be read in any other.

`collect` brings whole tensors to the first rank, one after another, whatever layout they are spread
over:

    rank 0   # # . .    . . . .      every rank says which rectangles of which tensors it holds
                                     (host, small);
    rank 1   . . # #    # # # #      rank 0 takes each from the lowest rank that has it, so copies
                                     are sent once

A rank of a pipeline has some of the tensors only, a tensor parallel rank some rows or columns, a
replica a flat range of the optimizer state. The invariant: a tensor that comes out is whole, every
element of it came from one rank.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import gather
from packgraph.torch_internals import wrapper_of

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
_MARK = "packgraph_part"


@dataclass(frozen=True)
class Part:
    """Place of a plain parameter in a larger tensor, such as some experts of a layer's stack.

    shape: of the whole, such as [E, ...], under which checkpoints hold it. copies: name of the
    mesh's group of ranks that hold the same part, over which its gradient is summed.
    """

    shape: torch.Size
    offsets: tuple[int, ...]
    copies: str


def mark_part(parameter: nn.Parameter, part: Part) -> None:
    """Say that `parameter` is part of a tensor, of which other ranks hold other parts, not
    copies."""
    setattr(parameter, _MARK, part)


def part_of(parameter: Tensor) -> Part | None:
    """Returns the mark of `mark_part`; None for a parameter of which every replica has a copy."""
    return getattr(parameter, _MARK, None)


def stored(
    tensors: Mapping[str, Tensor], parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """`tensors` (a state_dict) as checkpoints hold them: parts of tensors as `Pieces` of them.

    parameters: the model's, by the same names. The memory is shared.
    """
    parts = {
        name: part for name, parameter in parameters if (part := part_of(parameter)) is not None
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
        return wrapper_of(cls, shape, dtype=dtype)

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
                    # `create_from_tensor` asks CUDA whether the memory is pinned, but where a piece
                    # lies is nothing of the checkpoint's, and another thread may capture.
                    properties=TensorProperties(dtype=piece.dtype),
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


@dataclass(frozen=True)
class Holding:
    """Parts of a tensor that one rank has. shape: of the whole; rectangles: (offsets, sizes) of the
    parts held here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rectangles: tuple[Rectangle, ...]


def deliveries(held: Sequence[Mapping[str, Holding]]) -> dict[str, list[tuple[int, int]]]:
    """Senders of the pieces of every tensor, in order of names as ranks first name them: the rank,
    and the number of the rectangle among those that it holds.

    held: by rank. What several ranks hold they must hold as equal rectangles. Raises ValueError
    that names a tensor whose rectangles leave a gap or overlap.
    """
    chosen: dict[str, dict[Rectangle, tuple[int, int]]] = {}
    for rank, tensors in enumerate(held):
        for name, holding in tensors.items():
            known = chosen.setdefault(name, {})
            for number, rectangle in enumerate(holding.rectangles):
                if math.prod(rectangle[1]):
                    known.setdefault(rectangle, (rank, number))
    for name, known in chosen.items():
        shape = next(tensors[name].shape for tensors in held if name in tensors)
        count = sum(math.prod(sizes) for _, sizes in known)
        if count != math.prod(shape):
            raise ValueError(
                f"{name} {list(shape)} cannot be put together: the ranks hold {count} of its "
                f"{math.prod(shape)} elements, in {len(known)} different parts"
            )
    return {name: list(known.values()) for name, known in chosen.items()}


def collect(mesh: Mesh, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """On rank 0 the name and a whole copy, on its device, of every tensor that some rank has;
    nothing on other ranks.

    tensors: what this rank has, by name: plain tensors (whole ones), DTensors, Pieces. Collective:
    every rank runs the iterator to its end. Raises ValueError on all ranks when the parts do not
    make whole tensors.
    """
    yield from collect_over(dist.group.WORLD if mesh.world > 1 else None, tensors)


def collect_over(
    group: dist.ProcessGroup | None, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The same over the ranks of `group`, None = this process alone, on the first of them."""
    own = 0 if group is None else dist.get_rank(group)
    parts = {name: parts_of(tensor) for name, tensor in tensors.items()}
    mine = {
        name: Holding(
            tuple(tensor.shape),
            tensor.dtype,
            tuple((corner, tuple(part.shape)) for corner, part in parts[name]),
        )
        for name, tensor in tensors.items()
    }
    held = gather(group, mine)
    device = next(
        (part.device for found in parts.values() for _, part in found), torch.device("cpu")
    )
    for name, wanted in deliveries(held).items():
        if own == 0:
            yield name, _put_together(name, wanted, held, parts, device, group)
            continue
        for rank, number in wanted:
            if rank == own:
                sent = parts[name][number][1].contiguous()
                dist.send(sent, group=group, group_dst=0)


def _put_together(
    name: str,
    wanted: Sequence[tuple[int, int]],
    held: Sequence[Mapping[str, Holding]],
    parts: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The whole tensor, of this rank's parts and what the others send."""
    holding = (
        held[wanted[0][0]][name]
        if wanted
        else next(tensors[name] for tensors in held if name in tensors)
    )
    whole = torch.empty(holding.shape, dtype=holding.dtype, device=device)
    for rank, number in wanted:
        corner, sizes = held[rank][name].rectangles[number]
        place = whole[
            tuple(slice(offset, offset + size) for offset, size in zip(corner, sizes, strict=True))
        ]
        if rank == 0:
            place.copy_(parts[name][number][1])
            continue
        received = torch.empty(sizes, dtype=holding.dtype, device=device)
        dist.recv(received, group=group, group_src=rank)
        place.copy_(received)
    return whole


def parts_of(tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offsets in the whole, live memory) of every part of a tensor that this rank holds."""
    if isinstance(tensor, Pieces):
        return tensor.pieces
    if isinstance(tensor, DTensor):
        return [
            (tuple(chunk.offsets), local_tensor(tensor.detach()))
            for chunk in tensor.__create_chunk_list__()
        ]
    part = part_of(tensor)
    return [((0,) * tensor.ndim if part is None else part.offsets, tensor.detach())]
