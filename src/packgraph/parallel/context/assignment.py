"""The state of a plan that is being made: rows with room, on blocks of ranks, and what every rank
has to do so far.

Blocks of a chain of sizes are nested, so the time of a step is the largest sum over a rank's rows
(see `ContextRequest.chains`); `loads` are these sums. A row whose block has other work than its own
is never waited for.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from packgraph.parallel.context.request import ContextRequest

Node = tuple[int, int]  # size and first rank of a block


@dataclass(slots=True)
class OpenRow:
    """One row: its block, documents, free tokens, and the places for documents that it has."""

    number: int
    size: int
    first: int
    room: int
    places: int
    documents: list[int] = field(default_factory=list)
    pairs: int = 0


class ContextAssignment:
    """Rows of one step. Only `open`, `merge`, `put` and `take` change it, and they keep `loads` and
    the shelves right.

    lengths: tokens of each document. chain: sizes, ascending. loads: microseconds per rank. used:
    rows per rank. rows: by number. shelves: for each block (free tokens, number of row), ascending,
    of rows that may take one more document.
    """

    def __init__(
        self, lengths: Sequence[int], request: ContextRequest, chain: Sequence[int]
    ) -> None:
        self.lengths, self.request, self.chain = lengths, request, tuple(chain)
        self.rows: dict[int, OpenRow] = {}
        self._opened = 0
        self.loads = [0.0] * request.world
        self.used = [0] * request.world
        self.row_of: dict[int, OpenRow] = {}
        self.shelves: dict[Node, list[tuple[int, int]]] = {}
        cost, tokens = request.cost, request.tokens
        self.pair_us = {size: cost.pair_us(size) for size in chain}
        self.place_us = {size: cost.place_us(size, tokens) for size in chain}
        self.empty_us = {size: cost.row_us(size, tokens, request.places[0], 0.0) for size in chain}

    def open(self, size: int, first: int) -> OpenRow:
        """A new empty row on the block of `size` ranks from `first`."""
        row = OpenRow(self._opened, size, first, size * self.request.tokens, self.request.places[0])
        self.rows[row.number] = row
        self._opened += 1
        for rank in range(first, first + size):
            self.used[rank] += 1
        self._add(row, self.empty_us[size])
        insort(self.shelves.setdefault((size, first), []), (row.room, row.number))
        return row

    def merge(self, parts: Sequence[OpenRow]) -> OpenRow:
        """One row of all ranks of `parts`, sibling blocks that make up a block, with their
        documents."""
        documents = [document for row in parts for document in row.documents]
        for document in documents:
            self.take(document)
        for row in parts:
            self._unshelve(row)
            del self.rows[row.number]
            self._add(row, -self.empty_us[row.size])
            for rank in range(row.first, row.first + row.size):
                self.used[rank] -= 1
        whole = self.open(sum(row.size for row in parts), min(row.first for row in parts))
        for document in documents:
            self.put(document, whole)
        return whole

    def load(self, size: int, first: int) -> float:
        """Of the busiest rank of a block."""
        return max(self.loads[first : first + size])

    @property
    def free_share(self) -> float:
        """Of all places for tokens."""
        places = sum(row.size for row in self.rows.values()) * self.request.tokens
        return sum(row.room for row in self.rows.values()) / places

    def step_us(self, row: OpenRow) -> float:
        """What one more document costs `row` in places (0 if there is one free)."""
        if len(row.documents) < row.places:
            return 0.0
        return (self.request.places_for(row.places + 1) - row.places) * self.place_us[row.size]

    def put(self, document: int, row: OpenRow) -> None:
        """Add a document to a row that has room for it."""
        self._unshelve(row)
        length = self.lengths[document]
        added = self.pair_us[row.size] * length * length + self.step_us(row)
        if len(row.documents) == row.places:
            row.places = self.request.places_for(row.places + 1)
        row.documents.append(document)
        row.room -= length
        row.pairs += length * length
        self.row_of[document] = row
        self._add(row, added)
        self._shelve(row)

    def take(self, document: int) -> OpenRow:
        """Remove a document from its row, which is returned."""
        row, length = self.row_of.pop(document), self.lengths[document]
        self._unshelve(row)
        row.documents.remove(document)
        row.room += length
        row.pairs -= length * length
        fewer = (
            self.request.places_for(len(row.documents)) if row.documents else self.request.places[0]
        )
        self._add(
            row,
            -self.pair_us[row.size] * length * length
            - (row.places - fewer) * self.place_us[row.size],
        )
        row.places = fewer
        self._shelve(row)
        return row

    def candidates(self, length: int, node: Node) -> Iterator[OpenRow]:
        """Rows of a block with room for `length` more tokens: the tightest, and the one with most
        room."""
        shelf = self.shelves.get(node)
        if shelf and shelf[-1][0] >= length:
            tightest = bisect_left(shelf, (length, -1))
            yield self.rows[shelf[tightest][1]]
            if tightest + 1 < len(shelf):
                yield self.rows[shelf[-1][1]]

    def nodes(self) -> list[Node]:
        """All blocks, larger ones first."""
        return [
            (size, first)
            for size in reversed(self.chain)
            for first in range(0, self.request.world, size)
        ]

    def _add(self, row: OpenRow, microseconds: float) -> None:
        for rank in range(row.first, row.first + row.size):
            self.loads[rank] += microseconds

    def _shelve(self, row: OpenRow) -> None:
        if row.room and len(row.documents) < self.request.places[-1]:
            insort(self.shelves[row.size, row.first], (row.room, row.number))

    def _unshelve(self, row: OpenRow) -> None:
        shelf = self.shelves[row.size, row.first]
        place = bisect_left(shelf, (row.room, row.number))
        if place < len(shelf) and shelf[place] == (row.room, row.number):
            del shelf[place]
