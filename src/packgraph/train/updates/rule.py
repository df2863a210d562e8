"""The seam between `train/optimizer.py` and the ways to update parameters.

    reduce ─▶ clip ─▶ norm, blocked? ─▶ UpdateRule.step(...) ─▶ gather
                                        one rule per kind of spans

An `UpdateRule` owns the state of some spans and updates the float32 values of this rank's part of
them. The invariant: a step asks nothing of the host and launches the same work every time, so it
can be captured; where it is blocked, no bit of values and state changes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from packgraph.parallel.flat_buffers import GradientBucket

PIECE = 2**23  # elements that rules with temporaries update at a time: 32 MiB of float32


@dataclass(frozen=True)
class Updated:
    """A span and the float32 values [own] that this rank updates, with their gradient."""

    span: GradientBucket
    master: Tensor

    @property
    def gradient(self) -> Tensor:
        """Float32 [own], of the whole step and clipped."""
        assert self.master.grad is not None
        return self.master.grad

    @property
    def values(self) -> Tensor:
        """Float32 [own], without autograd."""
        return self.master.detach()

    def named(self, key: str, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (a value for each element here) by `NAME.key` of each parameter, without copies:
        in the parameter's shape, or `Pieces` of it."""
        return {f"{m.name}.{key}": self.span.part(m, flat) for m in self.span.members}


class UpdateRule(Protocol):
    """How some spans are updated."""

    def step(self, learning_rate: Tensor, steps: Tensor, blocked: Tensor | None) -> None:
        """Update once.

        Args:
            learning_rate: Float32 [] on the device.
            steps: Updates so far, float32 [] on the device; is not changed.
            blocked: More than 0 if nothing is to change; float32 [] on the device.
        """

    def state_tensors(self) -> dict[str, Tensor]:
        """The state by `NAME.key`, in a form that any layout can load: whole tensors or `Pieces`.

        Live tensors, or copies that `load` takes back."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave, after values were written into that."""


def slices_of(size: int, piece: int = PIECE) -> Iterator[slice]:
    """Elements 0 .. size in pieces."""
    for start in range(0, size, piece):
        yield slice(start, min(start + piece, size))
