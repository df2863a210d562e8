"""Linear layers in float8, with a scale for each row of both operands.

    forward    rows of x by float8  @  rows of W by float8              -> [R, O]
    backward   rows of grad by float8  @  columns of W by float8        -> of x [R, I]
    fp8        grad^T @ x, in their dtype                               -> of W [O, I]
    fp8_weight_gradients
               columns of grad by float8 @ columns of x by float8       -> of W [O, I]
    mxfp8      as fp8, with a scale for each block of 32 of what is summed over

All float8 is e4m3: with a scale for each row what a row spans fits, and gradients gain more by a
third bit of mantissa than by e5m2's range. Sums on CUDA are those of fast accumulation, which has
fewer bits than float32; elsewhere products are those of the same codes, multiplied in float32. What
a layer saves for the backward is x and W, as a layer in bfloat16 does. Weights are cast anew in
each product: nothing is kept from call to call that a graph would freeze. The invariant: a row of
the result depends on this row of x alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from packgraph.ops import grouped_gemm as grouped
from packgraph.ops.float8.cast import (
    BLOCK,
    SMALLEST_INVERSE,
    blocks_to_float8,
    columns_to_float8,
    from_float8,
    rows_to_float8,
    swizzled,
)
from packgraph.ops.linear import PRODUCTS, NativeProduct, autocast, is_plain
from packgraph.ops.names import NATIVE
from packgraph.torch_internals import scaled_grouped_mm, scaled_mm

FLOAT8 = "fp8"
FLOAT8_GRADIENTS = "fp8_weight_gradients"
MXFP8 = "mxfp8"
MULTIPLE = 16  # of columns of both operands, as torch._scaled_mm wants them
ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)
DISTRIBUTED = (
    "its matrix is a DTensor, which float8 takes from packgraph.parallel.tensor.parallelize alone"
)
SPLIT = "layers in float8 that are split over ranks stay so"
NO_EXPERTS = f"experts have no products in {MXFP8}"
FAST_ACCUMULATION = True  # as torchao's recipe has it; benchmarks/fp8_products.py measures both


def float8_problems(
    device: torch.device, dtype: torch.dtype, experts: bool = False, precision: str = FLOAT8
) -> list[str]:
    """Every reason why products in float8 cannot run on `device` for numbers of `dtype`; none if
    they can. experts: whether there are grouped products, too."""
    found = [NO_EXPERTS] if experts and precision == MXFP8 else []
    if device.type != "cuda":
        return found  # multiplied in float32, for tests
    if precision == MXFP8:
        found += _problems_of_blocks(device)
    else:
        found += _problems_of_rows(device, experts)
    if dtype != torch.bfloat16:
        found.append(f"on a GPU float8 goes with bfloat16, not {dtype}")
    return found


def _problems_of_rows(device: torch.device, experts: bool) -> list[str]:
    capability, needed = torch.cuda.get_device_capability(device), HOPPER if experts else ADA
    if capability >= needed and not (experts and capability[0] != HOPPER[0]):
        return []
    what = "experts in float8 need exactly" if experts else "float8 needs"
    return [
        f"{what} compute capability {needed[0]}.{needed[1]}"
        f"{'' if experts else ' or more'}, {torch.cuda.get_device_name(device)} has "
        f"{capability[0]}.{capability[1]}"
    ]


def _problems_of_blocks(device: torch.device) -> list[str]:
    capability = torch.cuda.get_device_capability(device)
    if capability >= BLACKWELL:
        return []
    return [
        f"{MXFP8} needs compute capability {BLACKWELL[0]}.{BLACKWELL[1]} or more (Blackwell), "
        f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    ]


def size_problem(inputs: int, outputs: int, precision: str = FLOAT8) -> str | None:
    """Returns the reason why a layer [inputs] -> [outputs] cannot be in float8, None if it can."""
    multiple = BLOCK if precision == MXFP8 else MULTIPLE
    if inputs % multiple or outputs % multiple:
        return f"{inputs} x {outputs} is not made of multiples of {multiple}"
    return None


@dataclass(frozen=True)
class RankSplit:
    """Split of a layer's matrix [O, I] over the ranks of a mesh with one dimension.

    Attributes:
        mesh: The ranks.
        of_outputs: Whether outputs are split, else inputs.
        splits_rows: Where inputs are split, whether each rank gets its part [R / ranks, O] of the
            rows of the sum, else all of them.

    All that holds of float8 holds for each rank's part:

        outputs split    x [R, I], whole on all ranks -- W [O / ranks, I] --> [R, O / ranks]
                         gradient of x: a share [R, I] of each rank, summed over ranks
        inputs split     x [R, I / ranks] -- W [O, I / ranks] --> a share [R, O] of each rank,
                         summed over ranks, then the bias

    So where outputs are split, rows of x and of W have the scales of whole rows; where inputs are
    split, those of a rank's part of the row. Sums over ranks are of results, in the dtype of the
    products. DTensors are parameters, and what says how gradients are summed: nothing dispatches on
    them.
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
        return x.to_local(grad_placements=[Partial()])

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
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.library.custom_op("packgraph::float8_product", mutates_args=())
def float8_product(codes: Tensor, inverse: Tensor, weight: Tensor, blocks: bool = False) -> Tensor:
    """[R, O] = rows @ weight^T in weight's dtype. codes: [R, I] and inverse: [R, 1], of rows;
    weight: [O, I], cast here by rows. blocks: inverse is [R, I / 32], and weight is cast alike."""
    if blocks:
        return _multiply_blocks(codes, inverse, *blocks_to_float8(weight), weight.dtype)
    return _multiply(codes, inverse, *rows_to_float8(weight), None, weight.dtype)


@torch.library.custom_op("packgraph::float8_rows_gradient", mutates_args=())
def float8_rows_gradient(
    codes: Tensor, inverse: Tensor, weight: Tensor, blocks: bool = False
) -> Tensor:
    """[R, I] = grad @ weight in weight's dtype. codes: [R, O] and inverse: [R, 1], of grad; weight:
    [O, I], cast here by columns: in the backward, so that nobody keeps what it becomes. blocks: as
    in `float8_product`."""
    if blocks:
        turned = blocks_to_float8(weight.t().contiguous())
        return _multiply_blocks(codes, inverse, *turned, weight.dtype)
    return _multiply(codes, inverse, *columns_to_float8(weight), None, weight.dtype)


@torch.library.custom_op("packgraph::float8_weight_gradient", mutates_args=())
def float8_weight_gradient(
    grad: Tensor, grad_inverse: Tensor, codes: Tensor, inverse: Tensor, dtype: torch.dtype
) -> Tensor:
    """[O, I] = grad^T @ x in dtype. grad: [O, R] and codes: [I, R], of columns of the gradient and
    of x; their inverses: [O, 1], [I, 1]."""
    return _multiply(grad, grad_inverse, codes, inverse, None, dtype)


@torch.library.custom_op("packgraph::add_float8_weight_gradient", mutates_args=("total",))
def add_float8_weight_gradient(
    total: Tensor,
    grad: Tensor,
    grad_inverse: Tensor,
    codes: Tensor,
    inverse: Tensor,
    dtype: torch.dtype,
) -> None:
    """total += `float8_weight_gradient(...)`. The name is an agreement, see
    graphs/compiled/products.py."""
    total.add_(_multiply(grad, grad_inverse, codes, inverse, None, dtype))


float8_product.register_fake(
    lambda codes, inverse, weight, *_: weight.new_empty(codes.shape[0], weight.shape[0])
)


float8_rows_gradient.register_fake(
    lambda codes, inverse, weight, *_: weight.new_empty(codes.shape[0], weight.shape[1])
)


float8_weight_gradient.register_fake(
    lambda grad, grad_inverse, codes, inverse, dtype: grad.new_empty(
        grad.shape[0], codes.shape[0], dtype=dtype
    )
)


def _multiply(
    rows: Tensor,
    inverse: Tensor,
    matrices: Tensor,
    inverses: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[R, O] from codes of rows [R, I] and of matrices [O, I], or with offsets [E, O, I]."""
    if not rows.is_cuda:
        left, right = from_float8(rows, inverse), from_float8(matrices, inverses)
        if offsets is None:
            return (left @ right.t()).to(dtype)
        return grouped.multiply(left, right, offsets, True).to(dtype)
    rows = rows.contiguous()
    if offsets is None:
        return scaled_mm(
            rows,
            matrices.t(),
            scale_a=inverse,
            scale_b=inverses.t(),
            out_dtype=dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )
    return scaled_grouped_mm(
        rows,
        matrices.mT,
        inverse.flatten(),
        inverses.flatten(1),
        offs=offsets,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )


def _multiply_blocks(
    rows: Tensor, inverse: Tensor, matrix: Tensor, inverses: Tensor, dtype: torch.dtype
) -> Tensor:
    """[R, O] from codes of rows [R, I] and of a matrix [O, I], with a scale for each block of I.
    Raises RuntimeError on GPUs that do not scale by blocks."""
    if not rows.is_cuda:
        return (from_float8(rows, inverse) @ from_float8(matrix, inverses).t()).to(dtype)
    if problems := _problems_of_blocks(rows.device):
        raise RuntimeError("; ".join(problems))
    by, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        rows.contiguous(),
        matrix.t(),
        swizzled(inverse),
        by,
        swizzled(inverses),
        by,
        order,
        order,
        output_dtype=dtype,
    )


class _Products(torch.autograd.Function):
    """x [R, I] and weights [O, I] -> [R, O] of each; codes and inverse are x's. gradients: whether
    those of weights are in float8, too. blocks: whether blocks of rows have scales, not rows."""

    @staticmethod
    def forward(
        ctx: Any,
        gradients: bool,
        blocks: bool,
        x: Tensor,
        codes: Tensor,
        inverse: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.blocks = gradients, blocks
        ctx.save_for_backward(x, *weights)
        return tuple(float8_product(codes, inverse, weight, blocks) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_rows, needed = ctx.needs_input_grad[2], ctx.needs_input_grad[5:]
        cast = blocks_to_float8 if ctx.blocks else rows_to_float8
        by_columns = ctx.gradients and any(needed)
        of_x: Tensor | None = None
        inverses = []
        for grad, weight in zip(grads, weights, strict=True):
            if not (of_rows or by_columns):
                break
            codes, inverse = cast(grad)
            inverses.append(inverse)
            if of_rows:
                part = float8_rows_gradient(codes, inverse, weight, ctx.blocks)
                of_x = part if of_x is None else of_x + part
        if by_columns:
            found = _weight_gradients(x, grads, inverses, needed)
        else:
            found = [
                grad.t() @ x if needs else None for grad, needs in zip(grads, needed, strict=True)
            ]
        return None, None, of_x, None, None, *found


def _weight_gradients(
    x: Tensor, grads: Sequence[Tensor], inverses: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients in float8 of the weights that need one. inverses: of the rows of each grad, where
    those that are zero show: such rows of x take no part, whatever they hold."""
    taken = inverses[0] != SMALLEST_INVERSE
    for inverse in inverses[1:]:
        taken = taken | (inverse != SMALLEST_INVERSE)
    of_x = columns_to_float8(x, taken, MULTIPLE)
    return [
        float8_weight_gradient(*columns_to_float8(grad, None, MULTIPLE), *of_x, x.dtype)
        if needs
        else None
        for grad, needs in zip(grads, needed, strict=True)
    ]


def float8_linear(
    x: Tensor, layers: tuple[nn.Linear, ...], precision: str = FLOAT8
) -> tuple[Tensor, ...]:
    """Applies `layers` to the same x [..., I], which is cast once; returns [..., O] of each, in x's
    dtype (autocast: in that). Differentiable in x, weights and biases. Layers that are split over
    ranks are so in one way, and return plain tensors (`RankSplit`). Raises ValueError for sizes
    that float8 does not take, and for layers that are split in different ways, or that nobody said
    are split; RuntimeError on a GPU that does not scale as `precision` says."""
    split = _split_of(layers)
    own = [local_part(layer.weight) for layer in layers]
    for weight in own:
        if problem := size_problem(weight.shape[1], weight.shape[0], precision):
            raise ValueError(f"a linear layer in float8: {problem}")
    x, *weights = autocast(x if split is None else split.operand(x), *own)
    rows, blocks = x.flatten(0, -2), precision == MXFP8
    cast = (blocks_to_float8 if blocks else rows_to_float8)(rows.detach())
    how = precision == FLOAT8_GRADIENTS, blocks
    found = []
    for layer, made in zip(layers, _Products.apply(*how, rows, *cast, *weights), strict=True):
        made = made.unflatten(0, x.shape[:-1])
        if split is not None:
            found.append(split.result(made, layer.bias))
        else:
            found.append(made if layer.bias is None else made + layer.bias.to(made.dtype))
    return tuple(found)


def _split_of(layers: tuple[nn.Linear, ...]) -> RankSplit | None:
    """Returns the split of all of `layers` over ranks, None = they are not split."""
    split: RankSplit | None = getattr(layers[0], "split", None)
    if any(getattr(layer, "split", None) is not split for layer in layers):
        raise ValueError("linear layers in float8 that read one input are split in different ways")
    if split is None and any(isinstance(layer.weight, DTensor) for layer in layers):
        raise ValueError(f"a linear layer in float8: {DISTRIBUTED}")
    return split


class Float8Linear(nn.Linear):
    """An `nn.Linear` that multiplies in float8, over the same parameters. split: how its matrix is
    split over ranks, None = it is not (set by `parallel/tensor.py`).

    The gradient of weights stays in bfloat16 (torchao's `rowwise_with_gw_hp`): it is one matrix
    product as ever, so compiled backwards add it to `.grad` in place
    (`graphs/compiled/products.py`).
    """

    by = FLOAT8
    split: RankSplit | None = None

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, (self,), self.by)[0]


class Float8GradientsLinear(Float8Linear):
    """The same, with the gradient of its weight in float8, too.

    As torchao's `rowwise`. It sums over tokens, so x and grad are cast by columns, x once for all
    layers that read it. A product in float8 cannot add, so compiled backwards add what it returns.
    Rows of padding reach no gradient of a weight, whatever they hold: a row of x takes no part,
    neither in scales nor in sums, where its gradients are zero (below 2^-64, which float8 has as
    zero beside others).
    """

    by = FLOAT8_GRADIENTS


class Mxfp8Linear(Float8Linear):
    """The same as `Float8Linear`, with a scale for each block of 32.

    For Blackwell, whose tensor cores scale by blocks of 32 (MXFP8, by torch's `scaled_mm` with
    ScalingType.BlockWise1x32). It is emulated on CPUs, and has never run on a Blackwell GPU. A GPU
    of a lower compute capability is refused, and so are experts.
    """

    by = MXFP8


LAYERS: Mapping[str, type[nn.Linear]] = MappingProxyType(
    {
        NATIVE: nn.Linear,
        FLOAT8: Float8Linear,
        FLOAT8_GRADIENTS: Float8GradientsLinear,
        MXFP8: Mxfp8Linear,
    }
)


def is_float8(precision: str) -> bool:
    """Returns whether layers of this precision multiply in float8."""
    return precision in (FLOAT8, FLOAT8_GRADIENTS, MXFP8)


class Float8Product(NativeProduct):
    """Products in float8 but for the gradient of stacks of matrices, which is that of `native`."""

    name, splits = FLOAT8, True
    kind: type[Float8Linear] = Float8Linear

    def multiply(
        self, rows: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        cast = rows_to_float8 if transposed else columns_to_float8
        return _multiply(*rows_to_float8(rows), *cast(matrices), offsets, matrices.dtype)

    def layer(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        return self.kind(inputs, outputs, bias=bias)

    def merged(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        if all(is_plain(layer, self.kind) for layer in layers):
            return float8_linear(x, layers, self.name)
        return super().merged(x, layers)


class Float8GradientsProduct(Float8Product):
    """The same, whose plain layers have gradients of weights in float8, too."""

    name = FLOAT8_GRADIENTS
    kind = Float8GradientsLinear


class Mxfp8Product(Float8Product):
    """Products with a scale for each block of 32, of plain layers alone."""

    name, splits = MXFP8, False
    kind = Mxfp8Linear

    def multiply(
        self, rows: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        if offsets is not None:
            raise ValueError(NO_EXPERTS)
        matrix = matrices if transposed else matrices.t().contiguous()
        cast = *blocks_to_float8(rows), *blocks_to_float8(matrix)
        return _multiply_blocks(*cast, matrices.dtype)


Parts = Callable[[str], tuple[int, int]]
"""Over how many ranks inputs and outputs of the layer of a name are split."""


def _whole(name: str) -> tuple[int, int]:
    return 1, 1


def float8_layers(
    layers: nn.Module, precision: str = FLOAT8, parts: Parts = _whole
) -> tuple[list[str], list[nn.Linear]]:
    """The linear layers of `layers` that can change their product, and before them every reason why
    one cannot multiply by `precision`. Those of other classes than `nn.Linear`, and adapters of low
    rank, are not among them. parts: of layers that are yet to be split over ranks."""
    found = {
        place: module
        for place, module in layers.named_modules()
        if type(module) in LAYERS.values() and ".lora_" not in f".{place}"
    }
    problems = [
        f"{place}: {problem}"
        for place, module in found.items()
        if (problem := layer_problem(module, *parts(place), precision))
    ]
    return problems, [*found.values()]


def layer_problem(
    layer: nn.Linear, inputs: int, outputs: int, precision: str = FLOAT8
) -> str | None:
    """Returns the reason why a layer whose inputs and outputs are to be split over so many ranks
    cannot be in float8, None if it can."""
    if isinstance(layer.weight, DTensor) and getattr(layer, "split", None) is None:
        return DISTRIBUTED
    problem = size_problem(layer.in_features // inputs, layer.out_features // outputs, precision)
    if problem is None or inputs * outputs == 1:
        return problem
    return f"on each of {inputs * outputs} ranks {problem}"


def multiply_by(layers: nn.Module, name: str) -> list[str]:
    """Let the linear layers of `layers` (see `float8_layers`) multiply by `name`, one of `LAYERS`,
    over the same parameters. Returns every reason why one cannot; then none is changed."""
    problems, found = float8_layers(layers, name)
    if not is_float8(name):
        problems = [SPLIT] if any(getattr(module, "split", None) for module in found) else []
    if problems:
        return problems
    for module in found:
        module.__class__ = LAYERS[name]
    return []


PRODUCTS.update(
    {made.name: made for made in (Float8Product(), Float8GradientsProduct(), Mxfp8Product())}
)
