"""Local search: take work off the busiest rank, by moving one of its documents away or swapping it
for a shorter one.

A change is made only if both sides stay below what the busiest rank had, by a share of what that
rank has above the mean: so the descending list of the ranks' times gets smaller in the order of
words with each change, and the search ends. A count of changes, not a clock, limits it besides, so
that all ranks of a job find the same plan.
"""

from bisect import bisect_left
from collections.abc import Iterator

from packgraph.parallel.context.assignment import ContextAssignment, OpenRow

WORTH = 0.02  # of what the busiest rank has above the mean, that a change must take away
NEAR = 3  # partners of a swap that are looked at, on either side of the ideal length


def improve(board: ContextAssignment, rounds: int, enough: float = 0.0) -> int:
    """Change `board` up to `rounds` times, until its busiest rank needs at most `enough` µs;
    returns the changes."""
    for done in range(rounds):
        busiest = max(range(len(board.loads)), key=lambda rank: board.loads[rank])
        if board.loads[busiest] <= enough or not _relieve(board, busiest):
            return done
    return rounds


def _relieve(board: ContextAssignment, busiest: int) -> bool:
    """Make the best change that takes work off `busiest` towards the least busy rank for which
    there is one."""
    documents = [
        document
        for row in board.rows.values()
        if row.first <= busiest < row.first + row.size
        for document in row.documents
    ]
    documents.sort(key=lambda document: (-board.lengths[document], document))
    seen = set()
    for rank in sorted(range(len(board.loads)), key=lambda other: (board.loads[other], other)):
        blocks = [
            (size, rank - rank % size)
            for size in board.chain
            if not rank - rank % size <= busiest < rank - rank % size + size
        ]
        if not blocks or board.loads[rank] >= board.loads[busiest]:
            continue
        change = _best(board, busiest, documents, [block for block in blocks if block not in seen])
        seen.update(blocks)
        if change is not None:
            _apply(board, *change)
            return True
    return False


def _apply(board: ContextAssignment, document: int, partner: int | None, row: OpenRow) -> None:
    """Move `document` to `row`, and `partner`, which is there, to where it was."""
    if partner is not None:
        board.take(partner)
    left = board.take(document)
    board.put(document, row)
    if partner is not None:
        board.put(partner, left)


def _best(
    board: ContextAssignment, busiest: int, documents: list[int], blocks: list[tuple[int, int]]
) -> tuple[int, int | None, OpenRow] | None:
    """The document of `busiest`, partner and row that leave the least maximum of both sides' times;
    None if none helps."""
    before = board.loads[busiest]
    best, best_time = None, before - WORTH * (before - sum(board.loads) / len(board.loads))
    for size, first in blocks:
        there = sorted(
            (board.lengths[document], document)
            for row in board.rows.values()
            if (row.size, row.first) == (size, first)
            for document in row.documents
        )
        load = board.load(size, first)
        tried = set()
        for document in documents:
            left, length = board.row_of[document], board.lengths[document]
            if (length, left.size) in tried:
                continue
            tried.add((length, left.size))
            for partner, other, row, step in _partners(
                board, length, left, before - load, there, (size, first)
            ):
                moved = length * length - other * other
                time = max(
                    before - moved * board.pair_us[left.size],
                    load + moved * board.pair_us[size] + step,
                )
                if time < best_time:
                    best, best_time = (document, partner, row), time
    return best


def _partners(
    board: ContextAssignment,
    length: int,
    left: OpenRow,
    gap: float,
    there: list[tuple[int, int]],
    node: tuple[int, int],
) -> Iterator[tuple[int | None, int, OpenRow, float]]:
    """Shorter documents of a block that may change places with one of `length` tokens, about those
    that close `gap`; and rows that may take it without exchange: (document, its length, its row,
    what more places cost)."""
    for row in board.candidates(length, node):
        yield None, 0, row, board.step_us(row)
    moved = (
        gap / (board.pair_us[left.size] + board.pair_us[node[0]]) if board.pair_us[node[0]] else 0.0
    )
    ideal = max(length * length - moved, 0.0) ** 0.5
    middle, found = bisect_left(there, (ideal, -1)), 0
    for place in range(middle, len(there)):
        other, partner = there[place]
        if other >= length or found == NEAR:
            break
        row = board.row_of[partner]
        if row.room >= length - other:
            found += 1
            yield partner, other, row, 0.0
    # Documents much shorter than that hardly fit in; those a little shorter are tried.
    for place in range(middle - 1, max(middle - 1 - NEAR, -1), -1):
        other, partner = there[place]
        row = board.row_of[partner]
        if other < length and row.room >= length - other:
            yield partner, other, row, 0.0
