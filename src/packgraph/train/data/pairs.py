"""Pairs of a chosen and a rejected answer (preferences) in packs.

    row ─▶ Pair: both answers, each with its prompt ─▶ waits as one document ─▶ two documents of a
                                                                                pack, 2k and 2k + 1

A pair is one document of as many tokens as both have together, so it is never cut nor spread over
two packs, and all that packs documents packs it: windows, workers, positions to go on from. What
counts documents counts pairs; only packs themselves, and what is in them, count answers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import IGNORED, Document


@dataclass(frozen=True, eq=False)
class Pair(Document):
    """Two answers as one document: the chosen one, `first` tokens, and the rejected one behind it;
    of neither is the first token predicted."""

    first: int = 0

    @staticmethod
    def of(chosen: Document, rejected: Document) -> "Pair":
        """The pair of two documents with tokens to be predicted."""
        both = chosen, rejected
        targets = [one.tokens if one.targets is None else one.targets for one in both]
        joined = np.concatenate(targets)
        joined[len(chosen)] = IGNORED
        return Pair(np.concatenate([one.tokens for one in both]), joined, len(chosen))

    def answers(self) -> tuple[Document, Document]:
        """The chosen and the rejected one."""
        return self.part(0, self.first), self.part(self.first, len(self))


def capacities_of_pairs(capacities: Iterable[Capacity]) -> dict[Capacity, Capacity]:
    """Capacities as pairs count, half the documents, and the smallest one that each stands for."""
    largest_first = sorted(capacities, reverse=True)
    return {Capacity(one.tokens, one.documents // 2): one for one in largest_first}
