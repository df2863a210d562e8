"""Products of linear layers: the one place that says how rows meet a layer's matrix.

    layers      plain    one matrix         `linear_layer`, an `nn.Linear`
                merged   one input, several layers that read it         `merged`
                grouped  a matrix per expert, rows by expert            `product`

    product     forward      rows [R, I] @ matrix [O, I]^T           -> [R, O]
                backward     gradient [R, O] @ matrix                -> of the rows [R, I]
                             gradient^T @ rows                       -> of the matrix [O, I]
                adding       the same, added to the matrix's `.grad`

A `LinearProduct` has these four and serves all three kinds of layers with them. A decoder names its
product (`DecoderConfig.precision`), and layers ask for it by this name. `bf16` multiplies in
the dtype of its operands, as torch does: its plain layers are `nn.Linear` itself.

Operations here are opaque to compilers, so compiled and eager layers run the same code of a
product. The one that adds is put in place of the other by `graphs/compiled/products.py`, which
knows it by its name. Neither the router (`moe/router_product.py`), which wants float32, nor
embedding and head, whose matrix the loss reads chunk by chunk (`ops/loss.py`), are linear layers in
this sense.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from packgraph.ops import grouped_gemm as grouped
from packgraph.ops.kernels import save_inputs
from packgraph.ops.names import NATIVE
from packgraph.torch_internals import has_module_hooks

Kind = TypeVar("Kind", bound=nn.Module)


class LinearProduct(ABC):
    """One way to multiply, for all linear layers of a decoder.

    In all methods `matrices` is one matrix, or with `offsets` (int32 [E], where each expert's rows
    end) a stack [E, ...] of them; `transposed` says that a matrix is [O, I] and not [I, O]. Rows
    from offsets[-1] on may hold anything, and no method reads them. No method may wait for the
    device, return memory that came in, or depend on anything but its arguments: graphs have baked
    what it did.

    Attributes:
        name: In `DecoderConfig.precision`.
        splits: Whether layers can be split over tensor-parallel ranks, as `parallel/tensor.py`
            does: by DTensor's styles, or as layers in float8 by themselves.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = False

    @abstractmethod
    def multiply(
        self, rows: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        """The forward: [R, O] from rows [R, I], in their dtype."""

    @abstractmethod
    def rows_gradient(
        self, grad: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        """Gradient of the rows: [R, I] from grad [R, O], in its dtype. `transposed` as in the
        forward."""

    @abstractmethod
    def matrices_gradient(
        self, grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        """Gradient of the matrices, in their form, from grad [R, O] and rows [R, I]."""

    def add_matrices_gradient(
        self, total: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool
    ) -> None:
        """total += `matrices_gradient(grad, rows, offsets, transposed)`. total may be float32 where
        these are narrower."""
        total.add_(self.matrices_gradient(grad, rows, offsets, transposed))

    def layer(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        """A plain layer; of torch's own where the product is the native one."""
        return (
            nn.Linear(inputs, outputs, bias=bias)
            if self.name == NATIVE
            else ProductLinear(self, inputs, outputs, bias)
        )

    def merged(self, x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        """Applies layers of this product to one input: for products that can share work, such as
        converting x."""
        return tuple(layer(x) for layer in layers)


class NativeProduct(LinearProduct):
    """Products in the dtype of their operands, by torch and by the kernels of
    `ops/grouped_gemm.py`."""

    name, splits = NATIVE, True

    def multiply(
        self, rows: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        if offsets is None:
            return rows @ (matrices.t() if transposed else matrices)
        return grouped.multiply(rows, matrices, offsets, transposed)

    def rows_gradient(
        self, grad: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        return self.multiply(grad, matrices, offsets, not transposed)

    def matrices_gradient(
        self, grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool
    ) -> Tensor:
        if offsets is None:
            return grad.t() @ rows if transposed else rows.t() @ grad
        return grouped.matrices_gradient(grad, rows, offsets, transposed)

    def add_matrices_gradient(
        self, total: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool
    ) -> None:
        if offsets is None:
            super().add_matrices_gradient(total, grad, rows, offsets, transposed)
        else:
            grouped.add_matrices_gradient(total, grad, rows, offsets, transposed)


PRODUCTS: dict[str, LinearProduct] = {made.name: made for made in (NativeProduct(),)}


class ProductLinear(nn.Linear):
    """[R, I] -> [R, O] by a product that is not torch's own."""

    def __init__(self, by: LinearProduct, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.by = by.name

    def forward(self, x: Tensor) -> Tensor:
        x, weight = autocast(x, self.weight)
        made = product(x, weight, None, True, self.by)
        return made if self.bias is None else made + self.bias.to(made.dtype)


def is_plain(layer: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Returns whether a call of `layer` is the forward of `kind` and nothing else: no adapter
    around it, no hooks, no forward of its own."""
    return type(layer) is kind and "forward" not in layer.__dict__ and not has_module_hooks(layer)


def linear_layer(by: str, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A plain layer [R, inputs] -> [R, outputs] of the product called `by`."""
    return PRODUCTS[by].layer(inputs, outputs, bias)


def merged(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Applies layers of one product to the same x [R, I]."""
    return PRODUCTS[getattr(layers[0], "by", NATIVE)].merged(x, layers)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a[rows of e] @ b[e] for every expert e: [R, N]; undefined from row offsets[-1] on.
    Differentiable in a and b.

    a: [R, K]. b: [E, K, N], contiguous or the transposed view of a contiguous [E, N, K], of a's
    dtype (under autocast both are cast). offsets: int32 [E], ascending, one past the last row of
    each expert. No host sync. Raises ValueError for shapes that do not match, and on CUDA where
    only Triton could do it and is not installed.
    """
    if (
        a.dim() != 2
        or b.dim() != 3
        or a.shape[1] != b.shape[1]
        or offsets.shape != b.shape[:1]
        or offsets.dtype != torch.int32
    ):
        raise ValueError(
            f"grouped_mm needs a [R, K], b [E, K, N] and offsets int32 [E], got {list(a.shape)}, "
            f"{list(b.shape)} and {offsets.dtype} {list(offsets.shape)}"
        )
    a, b = autocast(a, b)
    if a.dtype != b.dtype:
        raise ValueError(
            f"grouped_mm needs rows and matrices of one dtype, got {a.dtype} and {b.dtype}"
        )
    transposed = b.stride(2) != 1 and b.stride(1) == 1
    return product(a, b.mT if transposed else b, offsets, transposed)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, in the dtype that autocast says where it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def as_given(x: Tensor) -> torch.autocast:
    """Context for products of the dtypes that go in: backwards may run under autocast."""
    return torch.autocast(x.device.type, enabled=False)


@torch.library.custom_op("packgraph::linear_product", mutates_args=())
def product(
    rows: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool, by: str = NATIVE
) -> Tensor:
    """`multiply` of the product called `by`. Differentiable in rows and matrices."""
    with as_given(rows):
        return PRODUCTS[by].multiply(rows, matrices, offsets, transposed)


@torch.library.custom_op("packgraph::linear_rows_gradient", mutates_args=())
def rows_gradient(
    grad: Tensor, matrices: Tensor, offsets: Tensor | None, transposed: bool, by: str = NATIVE
) -> Tensor:
    """`rows_gradient` of the product called `by`."""
    with as_given(grad):
        return PRODUCTS[by].rows_gradient(grad, matrices, offsets, transposed)


@torch.library.custom_op("packgraph::linear_matrices_gradient", mutates_args=())
def matrices_gradient(
    grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool, by: str = NATIVE
) -> Tensor:
    """`matrices_gradient` of the product called `by`."""
    with as_given(grad):
        return PRODUCTS[by].matrices_gradient(grad, rows, offsets, transposed)


@torch.library.custom_op("packgraph::add_linear_matrices_gradient", mutates_args=("total",))
def add_matrices_gradient(
    total: Tensor,
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor | None,
    transposed: bool,
    by: str = NATIVE,
) -> None:
    """`add_matrices_gradient` of the product called `by`. The operation's name is an agreement:
    graphs/compiled/products.py puts `add_name` for `name` where a weight's `.grad` may be added
    to."""
    with as_given(grad):
        PRODUCTS[by].add_matrices_gradient(total, grad, rows, offsets, transposed)


product.register_fake(
    lambda rows, matrices, offsets, transposed, *_: rows.new_empty(
        rows.shape[0], matrices.shape[-2 if transposed else -1]
    )
)


rows_gradient.register_fake(
    lambda grad, matrices, offsets, transposed, *_: grad.new_empty(
        grad.shape[0], matrices.shape[-1 if transposed else -2]
    )
)


@matrices_gradient.register_fake
def _matrices_shape(
    grad: Tensor, rows: Tensor, offsets: Tensor | None, transposed: bool, by: str = NATIVE
) -> Tensor:
    shape = (grad.shape[1], rows.shape[1]) if transposed else (rows.shape[1], grad.shape[1])
    return rows.new_empty(shape if offsets is None else (offsets.shape[0], *shape))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, matrices, offsets = ctx.saved_tensors
    needs_rows, needs_matrices, *_ = ctx.needs_input_grad
    how = offsets, *ctx.constants
    of_rows = rows_gradient(grad, matrices, *how) if needs_rows else None
    of_matrices = matrices_gradient(grad, rows, *how) if needs_matrices else None
    return of_rows, of_matrices, None, None, None


product.register_autograd(_differentiate, setup_context=save_inputs)
