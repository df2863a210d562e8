"""The seam between `train/optimizer.py` and the ways to update parameters.

    reduce ─▶ norm ─▶ scale, blocked? ─▶ UpdateRule.step(...) ─▶ gather
                                         one rule per kind of spans

An `UpdateRule` owns the state of some spans and updates the float32 values of this rank's part of
them, and the parameters of which these are copies. Gradients stay as the backward left them, in the
dtype of their span: a rule makes float32 copies that are clipped (`clipped`) of as many elements as
it updates at a time, or none where one kernel does it all. The invariant: a step asks nothing of
the host and launches the same work every time, so it can be captured; where it is blocked, no bit
of values and state changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.torch_internals import copy_each

PIECE = 2**23  # elements that rules with temporaries update at a time: 32 MiB of float32


@dataclass(frozen=True)
class Updated:
    """A span and the float32 values [own] that this rank updates: the span's own, or where that is
    narrower a copy, the master."""

    span: GradientBucket
    values: Tensor

    @staticmethod
    def of(span: GradientBucket) -> "Updated":
        """Wraps `span`, with a float32 copy of its present values if narrower."""
        return Updated(span, span.own_parameters.detach().float())

    @property
    def has_master(self) -> bool:
        """True if `values` are a copy."""
        return self.span.parameters.dtype != torch.float32

    def gradient(self, part: slice, scale: Tensor | None) -> Tensor:
        """That of elements `part` of this rank's part, `clipped`."""
        return clipped(self.span.own_gradients[part], scale)

    def named(self, key: str, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (a value for each element here) by `NAME.key` of each parameter, without copies:
        in the parameter's shape, or `Pieces` of it."""
        return {f"{m.name}.{key}": self.span.part(m, flat) for m in self.span.members}


class UpdateRule:
    """Rule by which some spans are updated.

    Attributes:
        updated: The spans.
        state: By key, for each span a float32 value for each element here; zeros at first.
    """

    def __init__(self, updated: Sequence[Updated], keys: Sequence[str] = ()) -> None:
        """Makes the state now and not at the first step: a resumed run needs the places to load
        into."""
        self.updated = list(updated)
        self.state = {key: [torch.zeros_like(each.values) for each in self.updated] for key in keys}

    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """Update values and parameters once.

        Args:
            learning_rate: Float32 [] on the device.
            steps: Updates so far, float32 [] on the device; is not changed.
            scale: What gradients are multiplied by, float32 [] on the device; None = 1.
            blocked: More than 0 if nothing is to change; float32 [] on the device.
        """

    def state_tensors(self) -> dict[str, Tensor]:
        """The state by `NAME.key`, in a form that any layout can load: whole tensors or `Pieces`.

        Live tensors, or copies that `load` takes back."""
        return {
            name: value
            for key, flats in self.state.items()
            for each, flat in zip(self.updated, flats, strict=True)
            for name, value in each.named(key, flat).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave, after values were written into that;
        nothing is to be done where that was live."""


def clipped(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """`gradient` in float32, multiplied by `scale` ([], None = 1). A copy, unless it is that
    already."""
    # [1] in place of []: a scalar would leave the product as narrow as the gradient is.
    return (gradient if scale is None else gradient * scale.view(1)).float()


def put(old: Tensor, new: Tensor, blocked: Tensor | None) -> None:
    """Write new values over old ones, if not blocked."""
    old.copy_(new if blocked is None else torch.where(blocked > 0, old, new))


def write_parameters(updated: Sequence[Updated]) -> None:
    """Write values that are copies to the parameters, rounded."""
    if narrow := [each for each in updated if each.has_master]:
        copy_each([each.span.own_parameters for each in narrow], [each.values for each in narrow])


def slices_of(size: int, piece: int = PIECE) -> Iterator[slice]:
    """Elements 0 .. size in pieces."""
    for start in range(0, size, piece):
        yield slice(start, min(start + piece, size))
