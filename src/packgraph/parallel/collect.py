"""Whole tensors on the first rank, one after another, whatever layout they are spread over.

    rank 0   # # . .    . . . .      every rank says which rectangles of which tensors it holds
                                     (host, small);
    rank 1   . . # #    # # # #      rank 0 takes each from the lowest rank that has it, so copies
                                     are sent once

A rank of a pipeline has some of the tensors only, a tensor parallel rank some rows or columns, a
replica a flat range of the optimizer state. The invariant: a tensor that comes out is whole, every
element of it came from one rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pieces import Pieces, Rectangle


@dataclass(frozen=True)
class Holding:
    """What one rank has of a tensor. shape: of the whole; rectangles: (offsets, sizes) of the parts
    held here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rectangles: tuple[Rectangle, ...]


@dataclass(frozen=True)
class Delivery:
    """Rectangle `number` of what `rank` holds of a tensor, which that rank sends."""

    rank: int
    number: int


def deliveries(held: Sequence[Mapping[str, Holding]]) -> dict[str, list[Delivery]]:
    """Who sends what of every tensor, in order of names as ranks first name them.

    held: by rank. What several ranks hold they must hold as equal rectangles. Raises ValueError
    that names a tensor whose rectangles leave a gap or overlap.
    """
    chosen: dict[str, dict[Rectangle, Delivery]] = {}
    for rank, tensors in enumerate(held):
        for name, holding in tensors.items():
            known = chosen.setdefault(name, {})
            for number, rectangle in enumerate(holding.rectangles):
                if math.prod(rectangle[1]):
                    known.setdefault(rectangle, Delivery(rank, number))
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
    parts = {name: parts_of(tensor) for name, tensor in tensors.items()}
    mine = {
        name: Holding(
            tuple(tensor.shape),
            tensor.dtype,
            tuple((corner, tuple(part.shape)) for corner, part in parts[name]),
        )
        for name, tensor in tensors.items()
    }
    held: list[Any] = [mine]
    if mesh.world > 1:
        held = [None] * mesh.world
        dist.all_gather_object(held, mine)
    device = next(
        (part.device for found in parts.values() for _, part in found), torch.device("cpu")
    )
    for name, wanted in deliveries(held).items():
        if mesh.rank == 0:
            yield name, _put_together(name, wanted, held, parts, device)
            continue
        for delivery in wanted:
            if delivery.rank == mesh.rank:
                dist.send(parts[name][delivery.number][1].contiguous(), 0)


def _put_together(
    name: str,
    wanted: Sequence[Delivery],
    held: Sequence[Mapping[str, Holding]],
    parts: Mapping[str, Sequence[tuple[tuple[int, ...], Tensor]]],
    device: torch.device,
) -> Tensor:
    """The whole tensor, of this rank's parts and what the others send."""
    holding = (
        held[wanted[0].rank][name]
        if wanted
        else next(tensors[name] for tensors in held if name in tensors)
    )
    whole = torch.empty(holding.shape, dtype=holding.dtype, device=device)
    for delivery in wanted:
        corner, sizes = held[delivery.rank][name].rectangles[delivery.number]
        place = whole[
            tuple(slice(offset, offset + size) for offset, size in zip(corner, sizes, strict=True))
        ]
        if delivery.rank == 0:
            place.copy_(parts[name][delivery.number][1])
            continue
        received = torch.empty(sizes, dtype=holding.dtype, device=device)
        dist.recv(received, delivery.rank)
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
    return [((0,) * tensor.ndim, tensor.detach())]
