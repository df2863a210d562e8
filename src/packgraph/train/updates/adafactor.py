"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) without momentum: of the squared gradients
of a matrix [R, C] it keeps a running mean of each row and of each column, R + C floats.

    mean square   V = row_var x col_var / mean(row_var)        vectors keep V itself
    direction     U = G / sqrt(V), divided by max(1, rms(U))   update clipping
    update        W -= rate * max(1e-3, rms(W)) * U            and decoupled weight decay

The rate is that of our schedule, a share of the weights' size (the paper's relative steps are off).
The decay of the means at update t is 1 - t^-0.8. All this is as in torch.optim.Adafactor, as long
as its rate is at most 1 / sqrt(t). A stack of matrices (experts) is as many matrices, each scaled
and clipped for itself.

Where ranks share the update of a parameter, each has a flat range of it: up to five boxes of a
stack of matrices. Sums of rows, columns and whole matrices are added up over these ranks, in two
collectives; the means are the same on all of them, so a checkpoint holds them whole.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.flat_buffers import Member
from packgraph.parallel.pieces import Pieces, part_of, rectangles
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import (
    Updated,
    UpdateRule,
    clipped,
    put,
    slices_of,
    write_parameters,
)

DECAY = -0.8  # power of the update's number by which the means forget
CLIP = 1.0  # largest root mean square of a direction
LEAST_RMS = 1e-3  # of the weights
TINY = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Box:
    """Elements that this rank updates: contiguous, of a stack of matrices (or of a vector, which
    is one row).

    weight, gradient: [e, r, c], the latter of its span's dtype. place: in [E, R, C]. variance:
    [e, r, c] of a vector, else None.
    """

    weight: Tensor
    gradient: Tensor
    place: tuple[slice, slice, slice]
    variance: Tensor | None


class Stack:
    """A parameter as a stack of matrices [E, R, C], and sums over the ranks that share it."""

    def __init__(self, each: Updated, member: Member, variance: Tensor | None) -> None:
        """variance: of the span's elements here, where these are vectors."""
        self.span, self.member, self.variance = each.span, member, variance
        self.shape = local_tensor(member.parameter).shape
        rows, columns = ((1, 1, *self.shape))[-2:]
        self.matrices = (math.prod(self.shape[:-2]), rows, columns)
        self.boxes = list(self._find(each, variance))
        device = each.values.device
        self.row_var, self.col_var = (
            torch.zeros(self.matrices[0], length, device=device) if variance is None else None
            for length in (rows, columns)
        )
        self.lengths = [self.matrices[0] * length for length in (rows, columns, 1, 1)]

    def _find(self, each: Updated, variance: Tensor | None) -> Iterator[Box]:
        place, own = self.member.place, each.span.own
        start, stop = max(place.start, own.start), min(place.stop, own.stop)
        for part in slices_of(max(0, stop - start)):
            first = start + part.start
            corner, last = first - place.start, start + part.stop - place.start
            for offsets, sizes in rectangles(corner, last, self.matrices):
                flat = slice(first - own.start, first - own.start + math.prod(sizes))
                box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                yield Box(
                    each.values[flat].view(sizes),
                    each.span.own_gradients[flat].view(sizes),
                    (box[0], box[1], box[2]),
                    None if variance is None else variance[flat].view(sizes),
                )
                first += math.prod(sizes)

    def sums_in(self, flat: Tensor) -> None:
        """Let sums lie in `flat`: of squared gradients by row and by column, of squared weights and
        of squared directions by matrix."""
        rows, columns, weights, directions = flat.split(self.lengths)
        self.rows = rows.view(self.matrices[0], -1)
        self.columns = columns.view(self.matrices[0], -1)
        self.weights, self.directions = weights, directions

    def add_sums(self, scale: Tensor | None) -> None:
        """Add this rank's elements to the sums, but those of directions. scale: of gradients."""
        for box in self.boxes:
            matrix, row, column = box.place
            if box.variance is None:
                square = clipped(box.gradient, scale).square()
                self.rows[matrix, row] += square.sum(-1)
                self.columns[matrix, column] += square.sum(-2)
            self.weights[matrix] += box.weight.square().sum((-2, -1))

    def forget(self, share: Tensor) -> None:
        """Make the new means of the sums. share: of this update's squares in them, []."""
        if self.row_var is not None and self.col_var is not None:
            _, rows, columns = self.matrices
            self.rows.copy_(self.row_var.lerp(self.rows / columns, share))
            self.columns.copy_(self.col_var.lerp(self.columns / rows, share))

    def direction(
        self, box: Box, share: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The direction of a box before it is clipped, and a vector's new variance."""
        gradient, (matrix, row, column) = clipped(box.gradient, scale), box.place
        if box.variance is None:
            mean = self.rows[matrix].mean(-1, keepdim=True).clamp(min=TINY)
            rows = self.rows[matrix, row] / mean
            square = rows[:, :, None] * self.columns[matrix, None, column]
            variance = None
        else:
            variance = box.variance.lerp(gradient.square(), share)
            square = variance.clone()
        return square.clamp_(min=TINY**2).rsqrt_().mul_(gradient), variance

    def add_directions(self, share: Tensor, scale: Tensor | None) -> None:
        """Add this rank's elements to the sums of directions."""
        for box in self.boxes:
            direction, _ = self.direction(box, share, scale)
            self.directions[box.place[0]] += direction.square().sum((-2, -1))

    def update(
        self,
        rate: Tensor,
        kept: Tensor,
        share: Tensor,
        scale: Tensor | None,
        blocked: Tensor | None,
    ) -> None:
        """Update weights and means, if not blocked. kept: what weight decay leaves of a weight."""
        elements = self.matrices[1] * self.matrices[2]
        size = (self.weights / elements).sqrt().clamp(min=LEAST_RMS)
        rates = rate * size / ((self.directions / elements).sqrt() / CLIP).clamp(min=1.0)
        for box in self.boxes:
            direction, variance = self.direction(box, share, scale)
            scaled = direction.mul_(rates[box.place[0], None, None])
            put(box.weight, box.weight * kept - scaled, blocked)
            if box.variance is not None and variance is not None:
                put(box.variance, variance, blocked)
        if self.row_var is not None and self.col_var is not None:
            put(self.row_var, self.rows, blocked)
            put(self.col_var, self.columns, blocked)

    def state(self) -> dict[str, Tensor]:
        """The means of rows and columns, or of elements, by `NAME.key`."""
        if self.variance is not None:
            return {f"{self.member.name}.variance": self.span.part(self.member, self.variance)}
        found: dict[str, Tensor] = {}
        part, lead = part_of(self.member.parameter), self.shape[:-2]
        for key, mean in (("row_var", self.row_var), ("col_var", self.col_var)):
            if mean is not None:
                value = mean.view(*lead, mean.shape[-1])
                if part is not None:  # experts: some matrices of a stack, each of them whole
                    shape = torch.Size((*part.shape[:-2], mean.shape[-1]))
                    offsets = (*part.offsets[:-2], 0)
                    value = Pieces(shape, value.dtype, [(offsets, value)])
                found[f"{self.member.name}.{key}"] = value
        return found


class Adafactor(UpdateRule):
    """Updates of any spans."""

    def __init__(self, updated: Sequence[Updated], config: OptimizerConfig) -> None:
        super().__init__(updated)
        self._weight_decay, self._stacks = config.weight_decay, list[Stack]()
        for each in self.updated:
            variance = None if each.span.decays else torch.zeros_like(each.values)
            self._stacks += [Stack(each, member, variance) for member in each.span.members]
        # The parameters that a group's ranks share, and memory for the sums of all of them.
        self._sums = list[tuple[dist.ProcessGroup | None, list[Stack], Tensor]]()
        for group in dict.fromkeys(each.span.group for each in self.updated):
            stacks = [stack for stack in self._stacks if stack.span.group is group]
            sizes = [sum(stack.lengths) for stack in stacks]
            flat = torch.zeros(sum(sizes), device=self.updated[0].values.device)
            for stack, sums in zip(stacks, flat.split(sizes), strict=True):
                stack.sums_in(sums)
            self._sums.append((group, stacks, flat))

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """See `UpdateRule.step`. Collective among ranks that share parameters."""
        share = torch.pow(steps + 1, DECAY)
        for group, stacks, flat in self._sums:
            flat.zero_()
            for stack in stacks:
                stack.add_sums(scale)
            _add_up(flat, group)
            for stack in stacks:
                stack.forget(share)
                stack.add_directions(share, scale)
            directions = torch.cat([stack.directions for stack in stacks])
            _add_up(directions, group)
            found = directions.split([stack.matrices[0] for stack in stacks])
            for stack, total in zip(stacks, found, strict=True):
                stack.directions.copy_(total)
        kept = {
            decays: 1 - learning_rate * (self._weight_decay if decays else 0.0)
            for decays in (True, False)
        }
        for stack in self._stacks:
            stack.update(learning_rate, kept[stack.span.decays], share, scale, blocked)
        write_parameters(self.updated)

    def state_tensors(self) -> dict[str, Tensor]:
        """See `UpdateRule.state_tensors`; all of it is live."""
        return {key: value for stack in self._stacks for key, value in stack.state().items()}


def _add_up(sums: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(sums, group=group)
