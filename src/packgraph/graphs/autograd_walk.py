"""Which leaves an autograd graph reaches, and how often each is read."""
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def leaves_behind(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The leaf tensors that need a gradient and that `tensors` were computed from, each once, in walking order."""
    wanted = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    found = {id(tensor): tensor for tensor in wanted if tensor.grad_fn is None}
    for node in _nodes_behind(wanted):
        if _is_leaf(node):
            found[id(node.variable)] = node.variable
    return list(found.values())


def readers_of_leaves(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """By identity of each leaf behind `tensors`: how many gradients of it a backward from all of them sums up."""
    return Counter(id(parent.variable) for node in _nodes_behind(tensors) for parent, _ in node.next_functions
                   if parent is not None and _is_leaf(parent))


def _nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node of the autograd graph behind `tensors`, once."""
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(parent for parent, _ in node.next_functions)


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"
