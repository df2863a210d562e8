"""Layers in float8 whose matrices are split over ranks: what goes into their products, and what
comes out.

    outputs split    x [R, I], whole on all ranks -- W [O / ranks, I] --> [R, O / ranks]
                     gradient of x: a share [R, I] of each rank, summed over ranks
    inputs split     x [R, I / ranks] -- W [O, I / ranks] --> a share [R, O] of each rank, summed
                     over ranks, then the bias

Products and casts are of local tensors. So where outputs are split, rows of x and of W have the
scales of whole rows; where inputs are split, those of a rank's part of the row. Sums over ranks are
of results, in the dtype of the products, as those of layers that are not in float8.

DTensors are parameters, and what says how gradients are summed: nothing dispatches on them.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True)
class RankSplit:
    """Split of a layer's matrix [O, I] over the ranks of a mesh with one dimension.

    Attributes:
        mesh: The ranks.
        of_outputs: Whether outputs are split, else inputs.
        splits_rows: Where inputs are split, whether each rank gets its part [R / ranks, O] of the
            rows of the sum, else all of them.
    """

    mesh: DeviceMesh
    of_outputs: bool
    splits_rows: bool = False

    def operand(self, x: Tensor) -> Tensor:
        """Returns the operand that this rank multiplies, a plain tensor.

        x: [..., I], plain or a DTensor, with the same values on all ranks where outputs are split;
        plain [..., I / ranks] where inputs are. Raises ValueError for a DTensor that is split.
        """
        if isinstance(x, DTensor):
            if not self.of_outputs or x.placements != (Replicate(),):
                kind = "outputs" if self.of_outputs else "inputs"
                raise ValueError(
                    f"a layer in float8 whose {kind} are split over ranks cannot read a DTensor "
                    f"with placements {x.placements}"
                )
        elif self.of_outputs:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        else:
            return x
        operand: Tensor = x.to_local(grad_placements=[Partial()])
        return operand

    def result(self, made: Tensor, bias: Tensor | None) -> Tensor:
        """Layer's output, a plain tensor. made: this rank's product; bias: the layer's."""
        if self.of_outputs:
            return made if bias is None else made + local_part(bias).to(made.dtype)
        share = DTensor.from_local(made, self.mesh, [Partial()], run_check=False)
        rows = Shard(0) if self.splits_rows else Replicate()
        whole: Tensor = share.redistribute(self.mesh, [rows]).to_local()
        if bias is None:
            return whole
        # Each rank adds it to the rows that it gets, so where these are parts of all rows, ranks
        # have shares of its gradient.
        share_of_bias = Partial() if self.splits_rows else Replicate()
        own: Tensor = bias.to_local(grad_placements=[share_of_bias])  # type: ignore[attr-defined]
        return whole + own.to(whole.dtype)


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiably; a plain tensor itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    part: Tensor = parameter.to_local()
    return part
