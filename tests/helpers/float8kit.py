"""What layers in float8 that are split over ranks compute, in one process: by cutting matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.ops.float8.cast import from_float8, naive_columns_to_float8, naive_rows_to_float8
from packgraph.ops.float8.linear import MULTIPLE, Float8Linear
from packgraph.parallel.tensor import BY_OUTPUTS, parts_of_layer


def rounded(x: Tensor) -> Tensor:
    """x in float8 by rows."""
    return from_float8(*naive_rows_to_float8(x)).to(x.dtype)


def rounded_columns(x: Tensor) -> Tensor:
    """x in float8 by columns."""
    return from_float8(*naive_columns_to_float8(x)).mT.to(x.dtype)


class CutProducts:
    """Products with matrices [O, I] of one input, cut for ranks as `RankSplit` has them.

    by_outputs: whether outputs are cut, else inputs. gradients: whether those of weights are in
    float8. whole_scales: whether rows that are cut keep the scales of whole rows, which is wrong.
    """

    def __init__(
        self, ranks: int, by_outputs: bool, gradients: bool, whole_scales: bool = False
    ) -> None:
        self.ranks, self.by_outputs = ranks, by_outputs
        self.gradients, self.whole_scales = gradients, whole_scales

    def _cut(self, x: Tensor, dim: int, by: Callable[[Tensor], Tensor] = rounded) -> list[Tensor]:
        if self.whole_scales:
            return [*by(x).chunk(self.ranks, dim)]
        return [by(part) for part in x.chunk(self.ranks, dim)]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[R, O] from x [R, I]."""
        if self.by_outputs:
            return torch.cat([rounded(x) @ part.t() for part in self._cut(weight, 0)], -1)
        parts = zip(self._cut(x, -1), self._cut(weight, -1), strict=True)
        return _sum([one @ other.t() for one, other in parts])

    def rows_gradient(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """[R, I] from the gradient [R, O] of each product."""
        if not self.by_outputs:
            pieces = [
                [rounded(grad) @ part for part in self._cut(weight, -1, rounded_columns)]
                for grad, weight in zip(grads, weights, strict=True)
            ]
            return torch.cat([_sum(of_rank) for of_rank in zip(*pieces, strict=True)], -1)
        shares = [
            [
                one @ other
                for one, other in zip(
                    self._cut(grad, -1), self._cut(weight, 0, rounded_columns), strict=True
                )
            ]
            for grad, weight in zip(grads, weights, strict=True)
        ]
        return _sum([_sum(of_rank) for of_rank in zip(*shares, strict=True)])

    def weight_gradients(self, x: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        """[O, I] of each product."""
        found: list[list[Tensor]] = []
        for rank in range(self.ranks):
            own_x = x if self.by_outputs else x.chunk(self.ranks, -1)[rank]
            own = [g.chunk(self.ranks, -1)[rank] if self.by_outputs else g for g in grads]
            found.append(self._weight_gradients_of_rank(own_x, own))
        dim = 0 if self.by_outputs else 1
        return [torch.cat(parts, dim) for parts in zip(*found, strict=True)]

    def _weight_gradients_of_rank(self, x: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
        if not self.gradients:
            return [grad.t() @ x for grad in grads]
        taken = torch.stack([rounded(grad).any(-1, keepdim=True) for grad in grads]).any(0)
        columns = from_float8(*naive_columns_to_float8(x, taken, MULTIPLE))
        return [
            (from_float8(*naive_columns_to_float8(grad, None, MULTIPLE)) @ columns.t()).to(x.dtype)
            for grad in grads
        ]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: CutProducts, x: Tensor, weight: Tensor) -> Tensor:
        ctx.cut = cut
        ctx.save_for_backward(x, weight)
        return cut.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_rows = ctx.cut.rows_gradient([grad], [weight])
        return None, of_rows, *ctx.cut.weight_gradients(x, [grad])


class CutLinear(Float8Linear):
    """A layer in float8 that computes by `cut`."""

    cut: CutProducts

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Cut.apply(self.cut, x, self.weight)
        return made if self.bias is None else made + self.bias


def cut_layers(model: nn.Module, ranks: int, *, whole_scales: bool = False) -> None:
    """Let the layers of `model` in float8 compute what they do where they are split over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear) and parts_of_layer(name, ranks) != (1, 1):
            by_outputs = name.rpartition(".")[2] in BY_OUTPUTS
            cut = CutProducts(ranks, by_outputs, module.gradients, whole_scales)
            module.__class__ = CutLinear
            module.cut = cut
