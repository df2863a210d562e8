"""Gradients of weights added by the product that makes them, in compiled backwards.

    usual      product -> gradient [O, I] -> written, read, added to `.grad`, which is read and
               written
    here       product + `.grad` -> `.grad`, which is read and written        (and rounded once instead of twice)

In the traced backward of a piece the gradient of a linear layer's weight is one matrix product that
nothing else reads. It is replaced by an operation that adds the product to memory that comes in:
the weight's `.grad`. Which weight that is is known from the weight itself, which the backward of a
linear layer reads, so that layers go on to share their code. The same goes for an operation of this
library, `packgraph::name`, that has a sibling `packgraph::add_name(total, ...)`.

The invariant: eager calls, captures and replays add alike. Where adding in place would be wrong
(somebody wants the gradient itself: `autograd.grad`, a hook, other uses of the weight), the product
is added to -0.0 and handed on.
"""  # noqa: E501

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packgraph.graphs.parameters import gradient_dtype, has_hooks
from packgraph.torch_internals import OpOverload, schema_of, will_run

aten = torch.ops.aten


@torch.library.custom_op("packgraph::add_product", mutates_args=("total",))
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [O, I] += left [O, T] @ right [T, I], rounded once, to total's dtype."""
    if total.dtype == left.dtype:
        total.addmm_(
            left, right
        )  # with out=total CUDA code would be asked for a copy, which is skipped at best
    elif total.is_cuda:  # of narrow numbers; the sum is what the product's own sums are
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@add_product.register_fake
def _add_product_shapes(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


class Product(NamedTuple):
    """A gradient that is a product: output `output` of a backward, of the weight that is its input
    `weight`."""

    output: int
    weight: int


def take_products(graph: torch.fx.GraphModule, weights: Container[int]) -> list[Product]:
    """Rewrite a traced backward in place: products that are gradients of weights are added to new
    inputs at its end.

    weights: which inputs of the forward are parameters. Returns the products in the order of the
    new inputs; their outputs are None from then on.
    """
    (output,) = graph.graph.find_nodes(op="output")
    placeholders = graph.graph.find_nodes(op="placeholder")
    place = {node.name: number for number, node in enumerate(placeholders)}
    outputs, found = list(output.args[0]), []
    last = placeholders[-1] if placeholders else None
    for number, node in enumerate(outputs):
        # AOTAutograd's names: input n of the forward is primals_n, and output n of the backward its
        # gradient.
        weight = place.get(f"primals_{number + 1}")
        chain = _product_behind(node)
        if (
            number not in weights
            or weight is None
            or chain is None
            or last is None
            or not _same_form(node, placeholders[weight])
        ):
            continue
        product = chain[-1]
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"total_{number + 1}")
        last.meta["val"] = torch.empty_like(
            placeholders[weight].meta["val"]
        )  # with memory of its own
        with graph.graph.inserting_before(product):
            adding = _adding_call(graph, product, last, flipped=len(chain) % 2 == 0)
        adding.meta["val"] = None
        outputs[number] = None
        output.args = (tuple(outputs) if isinstance(output.args[0], tuple) else outputs,)
        for used in chain:
            graph.graph.erase_node(used)
        found.append(Product(number, weight))
    # Inductor has noted which outputs of a backward are tensors, by their numbers.
    if (shown := output.meta.get("user_visible_output_idxs")) is not None:
        taken = {product.output for product in found}
        output.meta["user_visible_output_idxs"] = [
            number for number in shown if number not in taken
        ]
    graph.recompile()
    return found


def _product_behind(node: Any) -> list[torch.fx.Node] | None:
    """[node, ..., the product], with transpositions in between, if nothing else reads any of
    them."""
    chain: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and len(node.users) == 1:
        chain.append(node)
        if node.target is aten.mm.default:
            return chain
        if _sibling(node.target) is not None:
            return (
                chain if len(chain) % 2 == 1 else None
            )  # a stack of matrices is not turned around
        swaps = node.target is aten.t.default or (
            node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [0, 2, 1])  # type: ignore[arg-type]
        )
        if not swaps:
            return None
        node = node.args[0]
    return None


def _sibling(target: Any) -> OpOverload | None:
    """The operation of ours that adds what `target`, one of ours, returns."""
    if not isinstance(target, OpOverload) or target.namespace != "packgraph":
        return None
    packet = getattr(torch.ops.packgraph, f"add_{schema_of(target).name.partition('::')[2]}", None)
    return None if packet is None else packet.default


def _adding_call(
    graph: torch.fx.GraphModule, product: torch.fx.Node, total: torch.fx.Node, flipped: bool
) -> torch.fx.Node:
    """The call that adds `product`, turned around if `flipped`, to `total`."""
    sibling = _sibling(product.target)
    if sibling is not None:
        return graph.graph.call_function(sibling, (total, *product.args), dict(product.kwargs))
    left, right = (
        product.all_input_nodes
        if len(product.all_input_nodes) == 2
        else product.all_input_nodes * 2
    )
    if flipped:
        left, right = (_flip(graph, operand) for operand in (right, left))
    return graph.graph.call_function(torch.ops.packgraph.add_product.default, (total, left, right))


def _same_form(gradient: torch.fx.Node, weight: torch.fx.Node) -> bool:
    ours, theirs = gradient.meta["val"], weight.meta["val"]
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and theirs.is_contiguous()


def _flip(graph: torch.fx.GraphModule, operand: torch.fx.Node) -> torch.fx.Node:
    flipped = graph.graph.call_function(aten.permute.default, (operand, [1, 0]))
    flipped.meta["val"] = operand.meta["val"].permute(1, 0)
    return flipped


class AddingCode:
    """A compiled backward whose last inputs are what its products are added to. code: takes a list,
    as CompiledCode.

    shared: addresses of weights of several segments, whose gradients autograd adds up first.
    """

    def __init__(
        self,
        code: Callable[[list[Any]], Sequence[Any]],
        products: Sequence[Product],
        shared: set[int],
    ) -> None:
        self.code, self.products, self.shared = code, list(products), shared
        self._boxed_call = True

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """The gradients, None for those that were added in place."""
        totals = [self._total(arguments[product.weight]) for product in self.products]
        boxed = [*arguments, *(total for total, _ in totals)]
        arguments.clear()
        found = list(self.code(boxed))
        for product, (total, in_place) in zip(self.products, totals, strict=True):
            found[product.output] = None if in_place else total
        return found

    def _total(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Returns the tensor to add to, and whether it is the weight's `.grad`."""
        weight = _leaf_behind(weight)
        if (
            isinstance(weight, torch.nn.Parameter)
            and weight.data_ptr() not in self.shared
            and _adds(weight)
        ):
            with torch.no_grad():
                if weight.grad is None:
                    weight.grad = _nothing(weight)
            if _plain(weight.grad, weight):
                return weight.grad, True
        return _nothing(weight), False


def _nothing(weight: Tensor) -> Tensor:
    """Initial value of a gradient, as in graphs: to -0.0 everything adds without a change."""
    return torch.full_like(weight, -0.0, dtype=gradient_dtype(weight))


def _leaf_behind(weight: Tensor) -> Tensor:
    """The parameter that a backward's input is: where hooks of saved tensors were (those of
    offloading), autograd hands out another tensor with the same memory, which has no `.grad` but
    knows who adds to it."""
    if isinstance(weight, torch.nn.Parameter) or not (weight.is_leaf and weight.requires_grad):
        return weight
    return torch.autograd.graph.get_gradient_edge(weight).node.variable  # type: ignore[attr-defined]


def _adds(weight: torch.nn.Parameter) -> bool:
    """Returns whether the backward that is running adds to `.grad` of this weight, and nobody wants
    to see the gradient."""
    if has_hooks(weight):
        return False
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return will_run(node)
    except RuntimeError:  # the answer for leaves under autograd.grad, which adds to nothing
        return False


def _plain(gradient: Tensor, weight: Tensor) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.dtype == gradient_dtype(weight)
        and gradient.is_contiguous()
    )
