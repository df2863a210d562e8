"""Rows for the documents of a step, longest documents first: groups for those that need one, then
the rest where it delays least.

    1 bins    documents of more tokens than a rank has go, best fit decreasing, into bins of several
              ranks' tokens
    2 blocks  bins become rows, largest first, each on the least busy block of ranks with a
              microstep left
              left
    3 rows    what is left of the microsteps becomes rows of the smallest size
    4 rest    every other document goes, longest first, to the row that is done earliest with it

Best fit and longest processing time first are the classic rules for packing and for makespans
(Johnson 1974, Graham 1969). How large bins are is a trade: large ones are filled better and split
attention evenly, small ones exchange less. So bins of every least size are made (`openings`), and
what costs least is built.

Blocks of a chain of sizes are nested, so the time of a step is the largest sum over a rank's rows
(see `ContextRequest.chains`); `loads` are these sums. A row whose block has other work than its own
is never waited for.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from packgraph.parallel.context.request import ContextRequest

Bin = tuple[int, list[int]]  # ranks that share it, documents


@dataclass(frozen=True)
class Opening:
    """Beginning of a plan. chain: sizes that divide one another, ascending. smallest: of them, the
    least size of any row. bins: rows that are larger than that. alone: other documents, longest
    first. least_us: no rank's time can be less than this with these bins, in the microsteps they
    were made for.
    """

    chain: tuple[int, ...]
    smallest: int
    bins: tuple[Bin, ...]
    alone: tuple[int, ...]
    least_us: float


def openings(
    order: Sequence[int], lengths: Sequence[int], request: ContextRequest, microsteps: int
) -> list[Opening]:
    """Openings for the documents of `order`, which has the longest first; those of least time
    first."""
    found = []
    for chain in request.chains():
        if chain[-1] * request.tokens < lengths[order[0]]:
            continue
        for smallest in chain:
            shared = [
                document for document in order if lengths[document] > smallest * request.tokens
            ]
            alone = tuple(order[len(shared) :])
            larger = [size for size in chain if size > smallest]
            ways = (
                [_best_fit(shared, lengths, request, larger, size) for size in larger]
                if shared
                else [[]]
            )
            for bins in ways:
                shrunk = tuple(
                    (
                        request.needed(sum(lengths[document] for document in documents), larger),
                        documents,
                    )
                    for _, documents in bins
                )
                found.append(
                    Opening(
                        chain,
                        smallest,
                        shrunk,
                        alone,
                        _least_us(
                            shrunk,
                            smallest,
                            [lengths[document] for document in order],
                            request,
                            microsteps,
                        ),
                    )
                )
    return sorted(
        found, key=lambda opening: (opening.least_us, opening.smallest, len(opening.bins))
    )


def _least_us(
    bins: Sequence[Bin],
    smallest: int,
    lengths: Sequence[int],
    request: ContextRequest,
    microsteps: int,
) -> float:
    cost = request.cost
    base = cost.row_us(smallest, request.tokens, request.places[0], 0.0)
    groups = sum(
        size * (cost.row_us(size, request.tokens, request.places[0], 0.0) - base)
        for size, _ in bins
    )
    # Rows that stay empty need not be larger than the smallest size there is.
    pairs = cost.attention_us * sum(length * length for length in lengths)
    return base * microsteps + (groups + pairs) / request.world


def _best_fit(
    order: Sequence[int],
    lengths: Sequence[int],
    request: ContextRequest,
    sizes: Sequence[int],
    least: int,
) -> list[Bin]:
    """Bins of at least `least` ranks, best fit decreasing."""
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []
    for document in order:
        length = lengths[document]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            index = len(bins)
            bins.append((max(least, request.needed(length, sizes)), []))
            room = bins[index][0] * request.tokens
        bins[index][1].append(document)
        if len(bins[index][1]) < request.places[-1]:
            insort(rooms, (room - length, index))
    return bins


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
    """Rows of one step. Only `open` and `put` change it, and they keep `loads` and
    the shelves right.

    lengths: tokens of each document. chain: sizes, ascending. loads: microseconds per rank. used:
    rows per rank. rows: by number. shelves: for each block (free tokens, number of row), ascending,
    of rows that may take one more document.
    """

    def __init__(
        self, lengths: Sequence[int], request: ContextRequest, chain: Sequence[int]
    ) -> None:
        self.lengths, self.request, self.chain = lengths, request, tuple(chain)
        self.rows: list[OpenRow] = []
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
        room, places = size * self.request.tokens, self.request.places[0]
        row = OpenRow(len(self.rows), size, first, room, places)
        self.rows.append(row)
        for rank in range(first, first + size):
            self.used[rank] += 1
        self._add(row, self.empty_us[size])
        insort(self.shelves.setdefault((size, first), []), (row.room, row.number))
        return row

    def step_us(self, row: OpenRow) -> float:
        """Cost of a place for one more document in `row` (0 if there is one free)."""
        if len(row.documents) < row.places:
            return 0.0
        return (self.request.places_for(row.places + 1) - row.places) * self.place_us[row.size]

    def put(self, document: int, row: OpenRow) -> None:
        """Add a document to a row that has room for it."""
        length, shelf = self.lengths[document], self.shelves[row.size, row.first]
        place = bisect_left(shelf, (row.room, row.number))
        if place < len(shelf) and shelf[place] == (row.room, row.number):
            del shelf[place]
        added = self.pair_us[row.size] * length * length + self.step_us(row)
        if len(row.documents) == row.places:
            row.places = self.request.places_for(row.places + 1)
        row.documents.append(document)
        row.room -= length
        row.pairs += length * length
        self.row_of[document] = row
        self._add(row, added)
        if row.room and len(row.documents) < self.request.places[-1]:
            insort(shelf, (row.room, row.number))

    def _add(self, row: OpenRow, microseconds: float) -> None:
        for rank in range(row.first, row.first + row.size):
            self.loads[rank] += microseconds


def build(
    opening: Opening, lengths: Sequence[int], request: ContextRequest, microsteps: int
) -> tuple[ContextAssignment, list[int]]:
    """Rows of so many microsteps, and the documents that this opening found no place for."""
    assignment = ContextAssignment(lengths, request, opening.chain)
    left = _place(assignment, opening.bins, microsteps)
    for first in range(0, request.world, opening.smallest):
        for _ in range(microsteps - assignment.used[first]):
            assignment.open(opening.smallest, first)
    return assignment, left + fill(assignment, opening.alone)


def fill(assignment: ContextAssignment, documents: Sequence[int]) -> list[int]:
    """Add documents, in this order, to rows that there are; returns those that no row has room
    for."""
    # All blocks, larger ones first.
    nodes = [
        (size, first)
        for size in reversed(assignment.chain)
        for first in range(0, assignment.request.world, size)
    ]
    left = []
    for document in documents:
        row = _earliest(assignment, assignment.lengths[document], nodes)
        if row is None:
            left.append(document)
        else:
            assignment.put(document, row)
    return left


def _place(assignment: ContextAssignment, bins: Sequence[Bin], microsteps: int) -> list[int]:
    """Make the bins rows, larger sizes first and of one size the longest first, so that blocks stay
    whole.

    Returns the documents of bins for which there was no microstep left.
    """

    def busy(one: Bin) -> tuple[int, int]:
        return -one[0], -sum(assignment.lengths[document] ** 2 for document in one[1])

    smallest, left = assignment.empty_us[assignment.chain[0]], []
    for size, documents in sorted(bins, key=busy):
        free = [
            first
            for first in range(0, assignment.request.world, size)
            if assignment.used[first] < microsteps
        ]
        if not free:
            left += documents
            continue
        # Rows still to come are empty ones of the smallest size.
        first = min(
            free, key=lambda rank: (assignment.loads[rank] - assignment.used[rank] * smallest, rank)
        )
        row = assignment.open(size, first)
        for document in documents:
            assignment.put(document, row)
    return left


def _earliest(
    assignment: ContextAssignment, length: int, nodes: Sequence[tuple[int, int]]
) -> OpenRow | None:
    """The row whose ranks are done earliest with one more document of `length` tokens."""
    best, best_time, pairs = None, float("inf"), length * length
    for node in nodes:
        shelf = assignment.shelves.get(node)
        if shelf and shelf[-1][0] >= length:
            size, first = node
            load = max(assignment.loads[first : first + size]) + assignment.pair_us[size] * pairs
            if load < best_time:
                # Of the block's rows the tightest, and the one with most room, which may have a
                # place free.
                for _, number in (shelf[bisect_left(shelf, (length, -1))], shelf[-1]):
                    time = load + assignment.step_us(assignment.rows[number])
                    if time < best_time:
                        best, best_time = assignment.rows[number], time
    return best
