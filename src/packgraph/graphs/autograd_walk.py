"""Which leaves an autograd graph reaches."""
from collections.abc import Iterable
from typing import Any

import torch


def leaves_behind(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The leaf tensors that need a gradient and that `tensors` were computed from, each once, in walking order."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            continue
        if tensor.grad_fn is None:
            found[id(tensor)] = tensor
        else:
            stack.append(tensor.grad_fn)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found[id(node.variable)] = node.variable
        stack.extend(parent for parent, _ in node.next_functions)
    return list(found.values())
