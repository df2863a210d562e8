"""First values of matrices: normal, the same on every device and in every layout, drawn by all
cores at once.

    seed "0 layers.3.mlp.experts.down_proj 17"  ->  a generator of its own  ->  the matrix of expert
    17 in float32

Every matrix has a seed of its own, from its name, and so has every entry of a stack of matrices. So
it does not matter which process draws it and when: a pipeline stage or a rank with some of the
experts gets the values of the whole model, and threads may draw in any order. They draw on the
host, because generators of devices give other values: ten seconds for a billion parameters on one
core, as many times less as there are cores.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from packgraph.parallel.deferred import Piece, in_threads, region
from packgraph.parallel.pieces import part_of


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
        name, matrix = entry
        matrix.copy_(_drawn(matrix.shape, seed, name, scale))

    in_threads(draw, _matrices(parameters))


class NormalValues:
    """Fills any part of a parameter with the values that `draw_normal` gives it.

    A matrix is drawn whole, on the host, and what is kept of it is copied.
    """

    def __init__(self, name: str, shape: torch.Size, seed: int, scale: float) -> None:
        """shape: of the whole parameter."""
        self._name, self._shape, self._seed, self._scale = name, shape, seed, scale

    def __call__(self, pieces: Sequence[Piece]) -> None:
        if len(self._shape) < 3:
            self._fill(self._name, self._shape, pieces)
            return
        entries: dict[int, list[Piece]] = {}
        for (first, *offsets), target in pieces:
            for place, entry in enumerate(target.unbind(0), start=first):
                entries.setdefault(place, []).append((tuple(offsets), entry))
        for place, found in entries.items():
            self._fill(f"{self._name} {place}", self._shape[1:], found)

    def _fill(self, name: str, shape: torch.Size, pieces: Sequence[Piece]) -> None:
        if not any(target.numel() for _, target in pieces):
            return
        matrix = _drawn(shape, self._seed, name, self._scale)
        for offsets, target in pieces:
            target.copy_(matrix[region(offsets, target.shape, (0,) * len(shape))])


def _drawn(shape: torch.Size, seed: int, name: str, scale: float) -> Tensor:
    fresh = torch.empty(shape, dtype=torch.float32, device="cpu")
    return fresh.normal_(0.0, scale, generator=generator_of(seed, name))


def _matrices(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters:
        values = parameter.detach()  # whether gradients are on is known to the calling thread alone
        if values.is_meta:
            continue  # a model that is asked for its names and shapes
        if values.dim() < 3:
            yield name, values
        else:
            part = part_of(parameter)
            first = 0 if part is None else part.offsets[0]
            yield from (
                (f"{name} {place}", entry)
                for place, entry in enumerate(values.unbind(0), start=first)
            )
