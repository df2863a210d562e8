"""Which leaves an autograd graph reaches, how often each is read, and which results were computed
from others."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_OURS = __name__.split(".")[0]


def leaves_behind(tensors: Iterable[Any], walked: set[Any] | None = None) -> list[torch.Tensor]:
    """The leaf tensors that need a gradient and that `tensors` were computed from, each once, in
    walking order.

    walked: nodes to leave out, with what is behind them; those that are walked over are added.
    """
    wanted = [
        tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    found = {id(tensor): tensor for tensor in wanted if tensor.grad_fn is None}
    for node in _nodes_behind(wanted, walked):
        if _is_leaf(node):
            found[id(node.variable)] = node.variable
    return list(found.values())


def readers_of_leaves(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """By identity of each leaf behind `tensors`: how many gradients of it a backward from all of
    them sums up."""
    return Counter(
        id(parent.variable)
        for node in _nodes_behind(tensors)
        for parent, _ in node.next_functions
        if parent is not None and _is_leaf(parent)
    )


def readers_of_results(results: Sequence[torch.Tensor]) -> list[tuple[Any, list[tuple[int, int]]]]:
    """The nodes behind `results` that read some of them, with pairs: the place among a node's
    inputs, and which one.

    They pass gradients of other results on to these; results that nobody reads stand nowhere.
    """
    edges = {(result.grad_fn, result.output_nr): number for number, result in enumerate(results)}
    readers = []
    for node in _nodes_behind(results) if len(edges) > 1 else ():
        read = [
            (place, edges[edge]) for place, edge in enumerate(node.next_functions) if edge in edges
        ]
        if read:
            readers.append((node, read))
    return readers


def runs_python(results: Iterable[torch.Tensor]) -> bool:
    """Whether a backward from `results` runs Python code that is not packgraph's (a custom
    function)."""
    return any(
        isinstance(node, torch.autograd.function.BackwardCFunction)
        and type(node)._forward_cls.__module__.split(".")[0] != _OURS  # type: ignore[attr-defined]
        for node in _nodes_behind([result for result in results if result.requires_grad])
    )


def is_seen(tensor: torch.Tensor, own: int = 0) -> bool:
    """Whether somebody sees, or keeps, the gradient of a result. own: hooks that do not count."""
    return tensor.retains_grad or len(tensor._backward_hooks or ()) > own


def _nodes_behind(tensors: Iterable[torch.Tensor], walked: set[Any] | None = None) -> Iterator[Any]:
    """Every node of the autograd graph behind `tensors`, once. walked: see `leaves_behind`."""
    seen: set[Any] = set() if walked is None else walked
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
