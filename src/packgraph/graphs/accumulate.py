"""Adding gradients to their buffers a few dozen at a time while a backward is captured.

Autograd adds every parameter's gradient as soon as it is there: one small kernel each, eleven a
layer in a decoder. The sums are the same bit by bit if a few gradients wait for each other and one
multi-tensor kernel adds all of them.

    autograd     g1 + , g2 + , g3 + , ...              here     g1, g2, g3 ... -> one kernel for all

The invariant: gradients that wait hold at most WAITING_BYTES, so what a backward needs at most
hardly grows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from packgraph.graphs.parameters import local_tensor

WAITING_BYTES = 64 * 2**20


class Accumulator:
    """Takes the gradients of `aliases` (leaf parameters with `.grad`) over from autograd, between
    `begin` and `end`."""

    def __init__(self, aliases: Sequence[torch.Tensor], most: int = WAITING_BYTES) -> None:
        """most: bytes of gradients that wait before they are added."""
        self._aliases, self._most = list(aliases), most
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """From now on autograd leaves the adding to this object."""
        for alias in self._aliases:
            node = torch.autograd.graph.get_gradient_edge(alias).node
            self._hooks.append(node.register_prehook(self._taking(alias)))

    def end(self) -> None:
        """Add what still waits, and give the adding back to autograd."""
        self._add()
        self.drop()

    def drop(self) -> None:
        """Give the adding back to autograd; what waits is lost."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._waiting, self._bytes = [], [], 0

    def _taking(self, alias: torch.Tensor) -> Callable[[tuple[torch.Tensor | None, ...]], Any]:
        def take(gradients: tuple[torch.Tensor | None, ...]) -> Any:
            (gradient,) = gradients
            buffer = alias.grad
            if gradient is None or buffer is None or type(gradient) is not torch.Tensor:
                return None
            self._waiting.append((local_tensor(buffer), gradient))
            self._bytes += gradient.numel() * gradient.element_size()
            if self._bytes >= self._most:
                self._add()
            return (None,)  # nothing is left for autograd to add

        return take

    def _add(self) -> None:
        with torch.no_grad():
            if self._waiting:
                torch._foreach_add_(*map(list, zip(*self._waiting, strict=True)))
        self._waiting, self._bytes = [], 0
