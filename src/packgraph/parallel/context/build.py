"""A first plan, longest documents first: groups for those that need one, then the rest where it
delays least.

    1 bins    documents of more tokens than a rank has go, best fit decreasing, into bins of several
              ranks' tokens
    2 blocks  bins become rows, largest first, each on the least busy block of ranks that has a wave
              left
    3 rows    what is left of the waves becomes rows of the smallest size
    4 rest    every other document goes, longest first, to the row that is done earliest with it

Best fit and longest processing time first are the classic rules for packing and for makespans
(Johnson 1974, Graham 1969). How large bins are is a trade: large ones are filled better and split
attention evenly, small ones exchange less. So several openings are tried (`context_bins`).
"""

from bisect import bisect_left
from collections.abc import Sequence

from packgraph.parallel.context.assignment import ContextAssignment, OpenRow
from packgraph.parallel.context.bins import Bin, Opening, fullest
from packgraph.parallel.context.request import ContextRequest


def build(
    opening: Opening,
    lengths: Sequence[int],
    request: ContextRequest,
    waves: int,
    *,
    snug: bool = False,
) -> tuple[ContextAssignment, list[int]]:
    """Rows of so many waves, and the documents that this opening found no place for.

    snug: fill rows one after another as full as can be, where choosing by time leaves documents
    over.
    """
    board = ContextAssignment(lengths, request, opening.chain)
    left = _place(board, opening.bins, waves)
    for first in range(0, request.world, opening.smallest):
        for _ in range(waves - board.used[first]):
            board.open(opening.smallest, first)
    return board, left + fill(board, _snugly(board, opening.alone) if snug else opening.alone)


def fill(board: ContextAssignment, documents: Sequence[int]) -> list[int]:
    """Add documents, in this order, to rows that there are; returns those that no row has room
    for."""
    nodes, left = board.nodes(), []
    for document in documents:
        row = _earliest(board, board.lengths[document], nodes)
        if row is None:
            left.append(document)
        else:
            board.put(document, row)
    return left


def merge(board: ContextAssignment, documents: Sequence[int]) -> list[int]:
    """Find room for documents by making rows of sibling blocks one row, as small as may be; returns
    those left.

    Rows that are nearly full have room together that none of them has alone.
    """
    left = []
    for document in documents:
        parts = _roomy_siblings(board, board.lengths[document])
        if parts is None:
            left.append(document)
        else:
            board.put(document, board.merge(parts))
    return left


def _roomy_siblings(board: ContextAssignment, length: int) -> list[OpenRow] | None:
    """Rows of the roomiest blocks of one size below the same block, the smallest that have `length`
    tokens of room."""
    for part, size in zip(board.chain, board.chain[1:]):
        found: list[tuple[float, list[OpenRow]]] = []
        for first in range(0, board.request.world, size):
            shelves = [
                board.shelves.get((part, start)) for start in range(first, first + size, part)
            ]
            rows = [board.rows[shelf[-1][1]] for shelf in shelves if shelf]
            if (
                len(rows) == len(shelves)
                and sum(row.room for row in rows) >= length
                and sum(len(row.documents) for row in rows) < board.request.places[-1]
            ):
                found.append((board.load(size, first), rows))
        if found:
            return min(found, key=lambda one: one[0])[1]
    return None


def _snugly(board: ContextAssignment, documents: Sequence[int]) -> list[int]:
    """Fill rows, those with least room first, with the longest document that fits and the best
    company for it.

    documents: longest first. Returns those that are left.
    """
    waiting = list(documents)
    for row in sorted(board.rows.values(), key=lambda row: (row.room, row.number)):
        while len(row.documents) < board.request.places[-1]:
            longest = next(
                (document for document in waiting if board.lengths[document] <= row.room), None
            )
            if longest is None:
                break
            others = [document for document in waiting if document != longest]
            company = fullest(others, board.lengths, row.room - board.lengths[longest])
            taken = [longest, *company][: board.request.places[-1] - len(row.documents)]
            for document in taken:
                board.put(document, row)
            known = set(taken)
            waiting = [document for document in waiting if document not in known]
    return waiting


def _place(board: ContextAssignment, bins: Sequence[Bin], waves: int) -> list[int]:
    """Make the bins rows, larger sizes first and of one size the longest first, so that blocks stay
    whole.

    Returns the documents of bins for which there was no wave left.
    """

    def busy(one: Bin) -> tuple[int, int]:
        return -one[0], -sum(board.lengths[document] ** 2 for document in one[1])

    smallest, left = board.empty_us[board.chain[0]], []
    for size, documents in sorted(bins, key=busy):
        free = [first for first in range(0, board.request.world, size) if board.used[first] < waves]
        if not free:
            left += documents
            continue
        # Rows still to come are empty ones of the smallest size.
        first = min(free, key=lambda rank: (board.loads[rank] - board.used[rank] * smallest, rank))
        row = board.open(size, first)
        for document in documents:
            board.put(document, row)
    return left


def _earliest(
    board: ContextAssignment, length: int, nodes: Sequence[tuple[int, int]]
) -> OpenRow | None:
    """The row whose ranks are done earliest with one more document of `length` tokens."""
    best, best_time, pairs = None, float("inf"), length * length
    for node in nodes:
        shelf = board.shelves.get(node)
        if shelf and shelf[-1][0] >= length:
            size, first = node
            load = max(board.loads[first : first + size]) + board.pair_us[size] * pairs
            if load < best_time:
                # Of the block's rows the tightest, and the one with most room, which may have a
                # place free.
                for _, number in (shelf[bisect_left(shelf, (length, -1))], shelf[-1]):
                    time = load + board.step_us(board.rows[number])
                    if time < best_time:
                        best, best_time = board.rows[number], time
    return best
