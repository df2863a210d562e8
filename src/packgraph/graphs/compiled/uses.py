"""Which weights' gradients autograd adds up before they reach `.grad`, found by counting uses.

    a weight is used            its gradients go
    once                        to `.grad` in place, where they are products
    several times, by pieces
      of one segment            to `.grad` in place, if all of them are products
      of several segments       back to autograd, by every segment, which adds them up

Replays add in the same order, so the decision is the same for eager calls and captures.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch

from packgraph.graphs.saved_tensors import in_backward


class ForwardUses:
    """Which weights a forward uses, by address. segment: of the call, that runs now: each has a
    graph of its own."""

    def __init__(self) -> None:
        self.segment = 0
        self._uses: list[tuple[int, int]] = []

    def use(self, addresses: set[int]) -> None:
        """A piece uses these weights."""
        self._uses += [(address, self.segment) for address in addresses]

    def summed(self, returned: Container[int]) -> set[int]:
        """Weights with several uses whose gradients do not all go to `.grad` in place: some
        backward returns its own, or they are of several segments, which return them all."""
        uses = Counter(address for address, _ in self._uses)
        segments = Counter(address for address, _ in set(self._uses))
        return {
            address
            for address, count in uses.items()
            if segments[address] > 1 or (count > 1 and address in returned)
        }


class WeightUses:
    """now: the forward that is counted, None where nobody counts. returned: addresses of weights
    whose gradient some backward returns, other than adding it as a product. draws: how often code
    was called that draws random numbers."""

    def __init__(self) -> None:
        self.now: ForwardUses | None = None
        self.returned: set[int] = set()
        self.draws = 0

    def next_segment(self) -> None:
        """The next segment of a call begins."""
        if self.now is not None:
            self.now.segment += 1

    def note_drawing(self, taken: Sequence[frozenset[int]], arguments: Sequence[Any]) -> None:
        """Such code is called, and draws random numbers."""
        self.draws += 1
        self.note(taken, arguments)

    def note(self, taken: Sequence[frozenset[int]], arguments: Sequence[Any]) -> None:
        """A forward's code is called; one that a backward makes again uses what it has used.
        taken: the inputs whose gradients its backward adds as products; empty = there is none."""
        if self.now is None or in_backward():
            return
        used = {
            number: x.data_ptr()
            for number, x in enumerate(arguments)
            if isinstance(x, torch.nn.Parameter)
        }
        self.now.use(set(used.values()))
        for products in taken:
            self.returned |= {used[number] for number in used.keys() - products}
