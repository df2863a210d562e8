"""Values of parameters: fresh ones, and those of safetensors, of any part without the whole.

Fresh matrices are normal, the same on every device and in every layout, drawn by all cores at once:

    seed "0 layers.3.mlp.experts.down_proj 17"  ->  a generator of its own  ->  the matrix of expert
    17 in float32

Every matrix has a seed of its own, from its name, and so has every entry of a stack of matrices. So
it does not matter which process draws it and when: a pipeline stage or a rank with some of the
experts gets the values of the whole model, and threads may draw in any order. They draw on the
host, because generators of devices give other values: ten seconds for a billion parameters on one
core, as many times less as there are cores.

    experts.gate_up_proj [E, 2I, H]    part of it      #######       in the files
      expert 3, rows 0 .. I            ─────────────   #### ▓▓▓  ◂──  experts.3.gate_proj.weight
      expert 3, rows I .. 2I                           ▓▓▓▓ ###  ◂──  experts.3.up_proj.weight

A parameter is stored as one tensor, or as several that are boxes of it. Only rows (and columns)
within the part are read. The invariant: the values are those that a copy of the whole gives.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from packgraph.parallel.deferred import (
    Piece,
    fill_copies,
    in_threads,
    overlap,
    region,
    whole_shape,
)
from packgraph.parallel.pieces import Rectangle, parts_of

Opens = Callable[[Path], contextlib.AbstractContextManager[Any]]


@runtime_checkable
class DrawsParameters(Protocol):
    """A module with parameters that are no matrices of normal values."""

    def draw_parameters(self, generator: torch.Generator) -> None:
        """Fill those parameters, with values drawn on the generator's device."""


def generator_of(seed: int, name: str) -> torch.Generator:
    """The generator of what has this name, on the host."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def draw_normal(parameters: Iterable[tuple[str, Tensor]], seed: int, scale: float) -> None:
    """Fill matrices [I, J], and stacks of them [E, I, J], with normal values of mean 0 and
    deviation `scale`.

    parameters: their names and themselves, on any device, in any dtype. Of a stack some entries may
    be here alone.
    """

    def draw(entry: tuple[str, Tensor]) -> None:
        name, parameter = entry
        fill_normal(name, whole_shape(parameter), seed, scale, parts_of(parameter))

    # A model that is asked for its names and shapes has no memory.
    in_threads(draw, [(name, found) for name, found in parameters if not found.is_meta])


def fill_normal(
    name: str, shape: torch.Size, seed: int, scale: float, pieces: Sequence[Piece]
) -> None:
    """Fill any part of a parameter of `shape` with the values that `draw_normal` gives it.

    A matrix is drawn whole, on the host, and what is kept of it is copied.
    """
    if len(shape) >= 3:
        entries: dict[int, list[Piece]] = {}
        for (first, *offsets), target in pieces:
            for place, entry in enumerate(target.unbind(0), start=first):
                entries.setdefault(place, []).append((tuple(offsets), entry))
        for place, found in entries.items():
            fill_normal(f"{name} {place}", shape[1:], seed, scale, found)
    elif any(target.numel() for _, target in pieces):
        fill_copies(_drawn(shape, seed, name, scale), pieces)


def _drawn(shape: torch.Size, seed: int, name: str, scale: float) -> Tensor:
    fresh = torch.empty(shape, dtype=torch.float32, device="cpu")
    return fresh.normal_(0.0, scale, generator=generator_of(seed, name))


class StoredBox(NamedTuple):
    """A stored tensor, and which box of the whole parameter it is; dimensions of the box in front
    that the tensor lacks have the size 1."""

    name: str
    file: Path
    box: Rectangle


def box_of(view: Tensor, whole: torch.Size) -> Rectangle:
    """The box that a contiguous view of a tensor of this shape is."""
    rest, offsets = view.storage_offset(), []
    for dim in range(len(whole)):
        inner = math.prod(whole[dim + 1 :])
        offsets.append(rest // inner)
        rest %= inner
    return tuple(offsets), (1,) * (len(whole) - view.ndim) + tuple(view.shape)


def fill_stored(boxes: Sequence[StoredBox], opens: Opens, pieces: Sequence[Piece]) -> None:
    """Fill any part of a parameter from the boxes of it that files hold.

    opens: a file of safetensors, as a context manager.
    """
    with contextlib.ExitStack() as stack:
        files = dict[Path, Any]()
        for name, file, box in boxes:
            for offsets, target in pieces:
                if (found := overlap((offsets, tuple(target.shape)), box)) is None:
                    continue
                if file not in files:
                    files[file] = stack.enter_context(opens(file))
                stored = files[file].get_slice(name)
                missing = target.ndim - len(stored.get_shape())
                part = stored[region(*found, box[0])[missing:]]
                place = target[region(*found, offsets)]
                place.copy_(part.view(place.shape))
