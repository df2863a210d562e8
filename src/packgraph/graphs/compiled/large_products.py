"""Large matrix products in compiled code, made by quack-kernels where it is installed.

    forward    aten.mm(x [T, I], weight^T)        linear layers, of whatever model
    backward   aten.mm(gradient [T, O], weight)   gradients of their inputs

Products that add to gradients of weights (products.py) stay cuBLAS's, which is faster there. Shapes
of compiled code are known when it is compiled, so the choice is made once and is part of the code:
eager calls, captures and replays all run it.
"""

import torch

from packgraph.kernels import quack

aten = torch.ops.aten


def take_large_products(graph: torch.fx.GraphModule) -> int:
    """Put `packgraph::large_product` in place of those products of a traced graph that it makes
    faster, and return how many."""
    found = 0
    for node in graph.graph.find_nodes(op="call_function", target=aten.mm.default):
        left, right = (operand.meta["val"] for operand in node.args)
        if quack.is_faster(left, right):
            node.target = torch.ops.packgraph.large_product.default
            found += 1
    if found:
        graph.recompile()
    return found
