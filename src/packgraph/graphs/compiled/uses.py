"""Weights whose gradients autograd adds up before they reach `.grad`, found by counting uses.

    a weight is used by pieces of   products that are its gradients go
    one segment                     to `.grad` in place
    several segments                back to autograd, which adds up what each segment returns

Each segment of a call has graphs of its own. Its backward adds to `.grad` of weights that no other
segment uses, and returns the gradients of all others. Eager calls of the same code do the same, so
both add in one order.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from packgraph.graphs.saved_tensors import in_backward


class ForwardUses:
    """Weights that a forward uses, by address, and their segments."""

    def __init__(self) -> None:
        self._segment = 0
        self._uses: set[tuple[int, int]] = set()

    def next_segment(self) -> None:
        """The next segment of the call begins."""
        self._segment += 1

    def use(self, addresses: set[int]) -> None:
        """A piece uses these weights."""
        self._uses |= {(address, self._segment) for address in addresses}

    def summed(self) -> set[int]:
        """Weights of several segments."""
        segments = Counter(address for address, _ in self._uses)
        return {address for address, count in segments.items() if count > 1}


class WeightUses:
    """now: the forward that is counted, None where nobody counts. draws: how often code was called
    that draws random numbers."""

    def __init__(self) -> None:
        self.now: ForwardUses | None = None
        self.draws = 0

    def note_drawing(self, arguments: Sequence[Any]) -> None:
        """Such code is called, and draws random numbers."""
        self.draws += 1
        self.note(arguments)

    def note(self, arguments: Sequence[Any]) -> None:
        """A forward's code is called; one that a backward makes again uses what it has used."""
        if self.now is not None and not in_backward():
            self.now.use({x.data_ptr() for x in arguments if isinstance(x, torch.nn.Parameter)})
