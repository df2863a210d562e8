"""Bitwise comparison of named tensors: equal in every bit, or the first that is not, and by how much."""
from collections.abc import Mapping
from dataclasses import dataclass

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


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers of the same width, so that NaN equals NaN and -0 differs from 0."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(INTEGER_OF_SIZE[flat.element_size()]) if flat.numel() else flat


def first_difference(step: int, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Difference | None:
    """The first name (in `expected`'s order) whose tensors are not equal bit by bit; None when all are."""
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in expected or name not in found:
            return Difference(step, name, "only in the " + ("eager run" if name in expected else "graph run"))
        left, right = expected[name], found[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return Difference(step, name, f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}")
        if not torch.equal(bits(left), bits(right)):
            return Difference(step, name, _size(left, right))
    return None


def _size(left: Tensor, right: Tensor) -> str:
    different = int((bits(left) != bits(right)).sum())
    text = f"{different} of {left.numel()} elements"
    if left.is_floating_point():
        distance = (left.detach().double() - right.detach().double()).abs()
        text += f", largest distance {float(distance.max()):.3g}"
        text += f" (largest value {float(left.detach().abs().max()):.3g})"
    return text
