"""How long the documents are: all that a plan of buckets needs to know of the data.

The order of documents does not matter: training draws it at random, so lengths in a row are
independent draws.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Overlong = Literal["error", "split", "drop"]


@dataclass(frozen=True)
class LengthHistogram:
    """Number of documents of each length. lengths: in tokens, ascending, each at least 1; counts:
    at least 1 each.

    Raises ValueError for anything else.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(one < other for one, other in zip(self.lengths, self.lengths[1:]))
        if (
            len(self.lengths) != len(self.counts)
            or not ascending
            or min((*self.lengths, *self.counts), default=1) < 1
        ):
            raise ValueError(
                "LengthHistogram: lengths must ascend from 1 and have a count of at least 1 each"
            )

    @staticmethod
    def of(lengths: Iterable[int]) -> "LengthHistogram":
        """The histogram of a stream of lengths in tokens; empty documents are left out. Reads the
        stream once."""
        found = Counter(int(length) for length in lengths)
        found.pop(0, None)
        return LengthHistogram(
            tuple(sorted(found)), tuple(found[length] for length in sorted(found))
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(self.counts)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(length * count for length, count in zip(self.lengths, self.counts))

    @property
    def mean(self) -> float:
        """Tokens of a document on average; 0 when there is none."""
        return self.tokens / max(1, self.documents)

    @property
    def longest(self) -> int:
        """Tokens of the longest document; 0 when there is none."""
        return self.lengths[-1] if self.lengths else 0

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the documents does not exceed; 0 when
        there is none."""
        sums = np.cumsum(self.counts)
        if not len(sums):
            return 0
        return self.lengths[min(int(np.searchsorted(sums, share * sums[-1])), len(sums) - 1)]

    def longer_than(self, limit: int) -> int:
        """Number of documents of more than `limit` tokens."""
        return sum(count for length, count in zip(self.lengths, self.counts) if length > limit)

    def within(self, limit: int, overlong: Overlong) -> "LengthHistogram":
        """The documents as the packer sees them when capacities take at most `limit` tokens of one
        document.

        Raises ValueError for longer documents when `overlong` is error.
        """
        found: Counter[int] = Counter()
        for length, count in zip(self.lengths, self.counts):
            if length <= limit:
                found[length] += count
            elif overlong == "error":
                raise ValueError(
                    f"{self.longer_than(limit)} of {self.documents} documents have more than "
                    f"{limit} "
                    f"tokens, the longest {self.longest}; allow larger buckets, or split or drop "
                    "what is "
                    "too long"
                )
            elif overlong == "split":
                found[limit] += length // limit * count
                found[length % limit] += count
        found.pop(0, None)
        return LengthHistogram(
            tuple(sorted(found)), tuple(found[length] for length in sorted(found))
        )

    def draw(self, count: int, seed: int) -> list[int]:
        """`count` lengths drawn independently, the same for the same arguments. Raises ValueError
        when empty."""
        if not self.lengths:
            raise ValueError("there are no documents to draw from")
        shares = np.array(self.counts) / self.documents
        return [
            int(length)
            for length in np.random.default_rng(seed).choice(self.lengths, size=count, p=shares)
        ]
