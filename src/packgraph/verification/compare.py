"""Bitwise comparison of named tensors: equal in every bit, or the first that is not, and by how
much."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs. size: what differs, in words."""

    step: int
    name: str
    size: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name}: {self.size}"


class Described(Protocol):
    """A tensor, or what is kept of one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


Value = TypeVar("Value", bound=Described)


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width, in the same shape, so that NaN equals NaN and
    -0 differs from 0."""
    return tensor.detach().view(INTEGER_OF_SIZE[tensor.element_size()])


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as flat integers of the same width."""
    return as_integers(tensor.contiguous()).view(-1)


def first_difference(
    step: int, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Difference | None:
    """The first name (in `expected`'s order) whose tensors are not equal bit by bit; None when all
    are."""
    return first_unequal(
        step,
        expected,
        found,
        lambda left, right: None if torch.equal(bits(left), bits(right)) else _size(left, right),
    )


def first_unequal(
    step: int,
    expected: Mapping[str, Value],
    found: Mapping[str, Value],
    differs: Callable[[Value, Value], str | None],
) -> Difference | None:
    """The first name (in `expected`'s order) whose values are not equal; None when all are.

    differs: of two values of one shape and dtype, what differs, in words; None where they are
    equal.
    """
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in expected or name not in found:
            return Difference(
                step, name, "only in the " + ("eager run" if name in expected else "graph run")
            )
        left, right = expected[name], found[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return Difference(
                step,
                name,
                f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}",
            )
        size = differs(left, right)
        if size is not None:
            return Difference(step, name, size)
    return None


def _size(left: Tensor, right: Tensor) -> str:
    different = int((bits(left) != bits(right)).sum())
    text = f"{different} of {left.numel()} elements"
    if left.is_floating_point():
        distance = (left.detach().double() - right.detach().double()).abs()
        text += f", largest distance {float(distance.max()):.3g}"
        text += f" (largest value {float(left.detach().abs().max()):.3g})"
    return text
