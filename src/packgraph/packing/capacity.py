"""The static shape of a microbatch, and which of several shapes a set of documents fits in.

Whether documents fit depends on three numbers only: their tokens, their count and the longest of
them. A `CapacitySet` answers all questions of the packers from these; several capacities need not
be ordered in all three at once.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LIMIT = 2**31  # kernels take boundaries of documents as 32-bit integers


@dataclass(frozen=True, order=True)
class Capacity:
    """Static shape of a microbatch: room for `tokens` tokens of at most `documents` documents.

    Capacities are ordered by tokens, then documents, then longest.

    Args:
        tokens: Number of tokens, padding included; the T of a batch's tensors.
        documents: Maximum number of documents; the N of a batch's tensors.
        longest: Maximum tokens of one document. Defaults to `tokens`; an int after construction.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> packgraph.Capacity(tokens=512, documents=32).longest
        512
    """

    tokens: int
    documents: int
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is None:
            object.__setattr__(self, "longest", self.tokens)
        for name in ("tokens", "documents", "longest"):
            value = getattr(self, name)
            try:  # whole numbers of any type, NumPy's too; a bool is none
                number = 0 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                number = 0
            if not 1 <= number < LIMIT:
                raise ValueError(
                    f"Capacity: {name} must be a whole number of at least 1 and below 2^31, got "
                    f"{str(value)[:40]}"
                )
            object.__setattr__(self, name, number)
        if self.bound > self.tokens:
            raise ValueError(
                f"Capacity: longest ({self.longest}) must not exceed tokens ({self.tokens}): a "
                "document "
                "of that length would not fit; leave longest out or lower it"
            )

    @property
    def bound(self) -> int:
        """`longest` with the type it has after construction."""
        return self.tokens if self.longest is None else self.longest

    def holds(self, tokens: int, documents: int, longest: int) -> bool:
        """Returns whether `documents` documents of `tokens` tokens in all, the longest of `longest`
        tokens, fit."""
        return tokens <= self.tokens and documents <= self.documents and longest <= self.bound


def in_short(capacity: Capacity) -> str:
    """A capacity as people write it: TOKENSxDOCUMENTS[xLONGEST]."""
    bound = "" if capacity.longest == capacity.tokens else f"x{capacity.longest}"
    return f"{capacity.tokens}x{capacity.documents}{bound}"


def read_capacities(capacities: Any) -> tuple[Capacity, ...]:
    """Reads capacities from a user, one `Capacity` or several of them; returns them smallest first
    and each once.

    Raises TypeError when something else is among them, ValueError when there are none.
    """
    example = "Capacity(tokens=1024, documents=32)"
    if isinstance(capacities, Capacity):
        return (capacities,)
    if isinstance(capacities, (str, bytes)) or not isinstance(capacities, Iterable):
        raise TypeError(
            f"capacities must be a packgraph.Capacity or a list of them, got {capacities!r}; write "
            f"[{example}]"
        )
    given = list(capacities)
    for item in given:
        if not isinstance(item, Capacity):
            raise TypeError(
                f"capacities must be packgraph.Capacity objects, got {item!r}; write {example}"
            )
    if not given:
        raise ValueError(f"capacities must name at least one Capacity, such as {example}")
    return tuple(sorted(set(given)))


def places(length: int, multiple: int) -> int:
    """Places that a document of `length` tokens takes up where documents take up multiples of
    `multiple`."""
    return -(-length // multiple) * multiple


class CapacitySet:
    """The capacities packs may have, smallest first.

    multiple: documents take up multiples of so many places, as where a row is cut in zigzag over
    several ranks; all tokens and lengths that the packers ask about are then places. A pack itself
    holds its documents as they are, one behind the other.
    """

    def __init__(self, capacities: Capacity | Iterable[Capacity], multiple: int = 1) -> None:
        """Raises ValueError when there are none, when multiple is not positive or when no document
        can have so many places, TypeError when something else is among them."""
        self.sorted, self.multiple = read_capacities(capacities), multiple
        if multiple < 1:
            raise ValueError(f"documents take up a multiple of at least 1 place, not {multiple}")
        if not self.longest:
            raise ValueError(
                f"documents take up multiples of {multiple} places, but no capacity has so many: "
                f"{', '.join(map(str, self.sorted))}"
            )
        # What another one holds in every respect never decides how much room there is.
        self._widest = tuple(
            (one.tokens, one.documents, one.bound)
            for one in self.sorted
            if not any(
                other.holds(one.tokens, one.documents, one.bound)
                for other in self.sorted
                if other != one
            )
        )

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document that fits in any capacity."""
        return max(capacity.bound for capacity in self.sorted) // self.multiple * self.multiple

    def places(self, length: int) -> int:
        """Places that a document of `length` tokens takes up."""
        return places(length, self.multiple)

    def room(self, tokens: int, documents: int, longest: int) -> int:
        """Length of the longest document that may join a pack of these totals (0: none may)."""
        most = 0
        for size, places, bound in self._widest:  # called for every document of a step
            if tokens <= size and documents < places and longest <= bound:
                left = size - tokens
                if left > bound:
                    left = bound
                if left > most:
                    most = left
        return most

    def smallest(self, tokens: int, documents: int, longest: int) -> Capacity:
        """The smallest capacity that holds a pack of these totals. Raises ValueError when none
        does."""
        for capacity in self.sorted:
            if capacity.holds(tokens, documents, longest):
                return capacity
        raise ValueError(
            f"no capacity holds {documents} documents of {tokens} tokens, the longest of "
            f"{longest}: "
            f"{', '.join(map(str, self.sorted))}"
        )
