"""Parts of parameters from safetensors, without a whole tensor in memory.

    experts.gate_up_proj [E, 2I, H]    part of it      #######       in the files
      expert 3, rows 0 .. I            ─────────────   #### ▓▓▓  ◂──  experts.3.gate_proj.weight
      expert 3, rows I .. 2I                           ▓▓▓▓ ###  ◂──  experts.3.up_proj.weight

A parameter is stored as one tensor, or as several that are boxes of it. Only rows (and columns)
within the part are read. The invariant: the values are those that a copy of the whole gives.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packgraph.parallel.deferred import Piece, overlap, region
from packgraph.parallel.pieces import Rectangle

Opens = Callable[[Path], contextlib.AbstractContextManager[Any]]


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


class StoredValues:
    """Fills any part of a parameter from the boxes of it that files hold."""

    def __init__(self, boxes: Sequence[StoredBox], opens: Opens) -> None:
        """opens: a file of safetensors, as a context manager."""
        self._boxes, self._opens = list(boxes), opens

    def __call__(self, pieces: Sequence[Piece]) -> None:
        with contextlib.ExitStack() as stack:
            files = dict[Path, Any]()
            for name, file, box in self._boxes:
                for offsets, target in pieces:
                    found = overlap((offsets, tuple(target.shape)), box)
                    if found is None:
                        continue
                    if file not in files:
                        files[file] = stack.enter_context(self._opens(file))
                    stored = files[file].get_slice(name)
                    missing = target.ndim - len(stored.get_shape())
                    part = stored[region(*found, box[0])[missing:]]
                    place = target[region(*found, offsets)]
                    place.copy_(part.view(place.shape))
