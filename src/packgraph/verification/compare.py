"""Bitwise comparison of named tensors, or of digests of them: equal in every bit, or the first that is
not, and by how much.

A `Digest` is 128 bits of a tensor, made where the tensor lies, to compare it with one that does not
exist at the same time:

    a tensor's bits     w0 w1 w2 ... wn | w0 w1 w2 ... wn | w0 w1 0      words of 32 bits in row-major order, in slices
    keys of level 0     k0 k1 k2 ... kn   the same for every slice       two rows of odd numbers of 64 bits
    sums of a slice     k0 w0 + k1 w1 + ... + kn wn modulo 2^64          one for each row of keys
    sums of a tensor    those of its only slice; or those of the tensor that the sums of its slices
                        make, by the keys
                        of the next level

The invariant: equal shape, dtype and bits give equal sums on every device and at every stride,
since integers are added up modulo 2^64, in whatever order.

How likely is it that different tensors have equal sums? Let word i of a slice differ, by d: a
number other than 0 and below 2^32 in size, so 2^t times an odd number, with t at most 31. If no
other word differs, k_i d is not 0 modulo 2^64, as k_i is odd: the sums differ for certain.
Otherwise they are equal only where k_i d is what the other words make up for, and at most 2^t of
the 2^63 odd numbers k_i give that: a chance of 2^-32 at most, and of 2^-64 for both rows, whose
keys are drawn apart (2^-126 where d is odd). Words that change places are such a difference. Each
further level, whose keys are drawn anew, adds the same chance once more; tensors of up to 2^42
words have two levels. Keys are random, but always the same ones: no model is made to meet them.
"""  # noqa: E501

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packgraph.parallel.pieces import rectangles

Moment = Mapping[str, Mapping[str, Any]]  # kind -> name -> a tensor, or its digest
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs. size: what differs, in words."""

    step: int
    name: str
    size: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.size}"


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width, in the same shape, so that NaN equals NaN and
    -0 differs from 0."""
    return tensor.detach().view(INTEGER_OF_SIZE[tensor.element_size()])


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as flat integers of the same width."""
    return as_integers(tensor.contiguous()).view(-1)


def unequal_elements(left: Tensor, right: Tensor) -> str | None:
    """Says by how much two tensors of one shape and dtype differ; None where all bits are equal."""
    if torch.equal(bits(left), bits(right)):
        return None
    text = f"{int((bits(left) != bits(right)).sum())} of {left.numel()} elements"
    if left.is_floating_point():
        distance = (left.detach().double() - right.detach().double()).abs()
        text += f", largest distance {float(distance.max()):.3g}"
        text += f" (largest value {float(left.detach().abs().max()):.3g})"
    return text


def first_difference(
    step: int,
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    differs: Callable[[Any, Any], str | None] = unequal_elements,
) -> Difference | None:
    """The first name (in `expected`'s order) whose values are not equal; None when all are.

    Args:
        step: That the difference is told with.
        expected: Tensors of the eager run, or what is kept of them: anything with shape and dtype.
        found: The same of the graph run.
        differs: What differs between two values of one shape and dtype, in words; None where they
            are equal.
    """
    for name in dict.fromkeys([*expected, *found]):
        if name not in expected or name not in found:
            side = "eager run" if name in expected else "graph run"
            return Difference(step, name, f"only in the {side}")
        left, right = expected[name], found[name]
        size: str | None = (
            f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        )
        if left.shape == right.shape and left.dtype == right.dtype:
            size = differs(left, right)
        if size is not None:
            return Difference(step, name, size)
    return None


SLICE_WORDS = (
    2**22
)  # 16 MiB: more than the GPU needs to be busy; keys and products of a slice are 64 MiB each
ROWS = 2
SEED = 20_260_714
DIFFERS = (
    "its bits differ (of the eager run there is only a digest, so neither elements nor sizes can "
    "be told)"
)


@dataclass(frozen=True)
class Digest:
    """Digest of a tensor, on the host."""

    shape: torch.Size
    dtype: torch.dtype
    sums: tuple[int, ...]


def unequal_digests(left: Digest, right: Digest) -> str | None:
    """`DIFFERS`, or None for equal digests; see `first_difference`."""
    return None if left.sums == right.sums else DIFFERS


class Digester:
    """Makes digests on `device`, and keeps the keys for them there.

    slice_words: even, at least 8; those with other slices make other digests.
    """

    def __init__(self, device: torch.device, slice_words: int = SLICE_WORDS) -> None:
        assert slice_words >= 8 and slice_words % 2 == 0, (
            "a word of 64 bits must not be cut, a level must be smaller"
        )
        self._device, self._slice_words = device, slice_words
        self._keys: list[Tensor] = []

    def digests(self, moments: Iterable[Moment]) -> list[Moment]:
        """The digests of all that is held at each of these moments, taken while it lasts. Waits for
        the device once, at the end."""
        taken = [
            {
                kind: {
                    name: (tensor.shape, tensor.dtype, self.sums(tensor))
                    for name, tensor in tensors.items()
                }
                for kind, tensors in moment.items()
            }
            for moment in moments
        ]
        launched = [
            sums for moment in taken for values in moment.values() for *_, sums in values.values()
        ]
        known = iter(torch.stack(launched).tolist())
        return [
            {
                kind: {
                    name: Digest(shape, dtype, tuple(next(known)))
                    for name, (shape, dtype, _) in values.items()
                }
                for kind, values in moment.items()
            }
            for moment in taken
        ]

    @torch.no_grad()
    def sums(self, tensor: Tensor, level: int = 0) -> Tensor:
        """The sums of a digest by the keys of a level, int64 [2] on the device, where the device
        may still be at work on them."""
        values = as_integers(tensor)
        if values.is_contiguous():
            values = values.view(-1)
        keys = self._keys_of(level)
        count, longest = values.numel(), self._slice_words * 4 // values.element_size()
        slices = (
            self._words(values, start, min(start + longest, count))
            for start in range(0, count, longest)
        )
        found = [(keys[:, : len(words)] * words).sum(dim=1) for words in slices]
        if len(found) > 1:
            return self.sums(torch.stack(found), level + 1)
        return found[0] if found else torch.zeros(ROWS, dtype=torch.int64, device=self._device)

    def _words(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Elements start .. stop in row-major order as words, int32, the last one filled up with
        zeros."""
        num_bytes = (stop - start) * values.element_size()
        words = torch.zeros(-(-num_bytes // 4), dtype=torch.int32, device=self._device)
        place, position = words.view(torch.uint8)[:num_bytes].view(values.dtype), 0
        for corner, sizes in rectangles(start, stop, values.shape):
            part = values[
                tuple(slice(first, first + size) for first, size in zip(corner, sizes, strict=True))
            ]
            place[position : position + math.prod(sizes)].view(sizes).copy_(part)
            position += math.prod(sizes)
        return words

    def _keys_of(self, level: int) -> Tensor:
        """int64 [2, slice_words], drawn on the host, so that they are the same on every device."""
        while len(self._keys) <= level:
            generator = torch.Generator().manual_seed(SEED + len(self._keys))
            drawn = torch.randint(
                -(2**63), 2**63 - 1, (ROWS, self._slice_words), generator=generator
            )
            self._keys.append((drawn | 1).to(self._device))
        return self._keys[level]
