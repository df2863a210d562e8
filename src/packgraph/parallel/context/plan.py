"""Dynamic context parallelism: which documents share a row, on how many ranks, in which microbatch
of the step.

A wave is a microbatch of all ranks: each runs one row, alone or in a group, so that groups of a
wave cover all ranks once. Waves come with large groups first. Groups wait for each other only where
their ranks meet in a later group:

    rank 0  [ c=4   ][ c=2  ][1]         a rank runs its groups as soon as their ranks are free;
    rank 1  [ c=4   ][ c=2  ][1 ]        with nested blocks, large ones first, that is at once:
    rank 2  [ c=4   ][1 ][ 1  ]          the step takes as long as the largest sum of a rank
    rank 3  [ c=4   ][ 1 ][1]

Everything follows from integers and from sums of floats in one order, so all ranks find the same
plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.bound import ContextBound, fewest_microsteps, lower_bound
from packgraph.parallel.context.build import (
    ContextAssignment,
    Opening,
    OpenRow,
    build,
    fill,
    openings,
)
from packgraph.parallel.context.request import ContextRequest

WINDOW = 256  # documents beyond the tokens of a step that may fill its gaps


@dataclass(frozen=True)
class RowGroup:
    """One row: `size` ranks from `first`, its documents (indices, ascending), its bucket and its
    predicted time."""

    size: int
    first: int
    documents: tuple[int, ...]
    bucket: Capacity
    us: float

    @property
    def ranks(self) -> range:
        """The ranks that share the row."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class ContextPlan:
    """Waves of groups by first rank, for documents of `lengths`; `left`: documents that wait for
    the next step."""

    request: ContextRequest
    lengths: tuple[int, ...]
    waves: tuple[tuple[RowGroup, ...], ...]
    left: tuple[int, ...]
    bound: ContextBound

    def group_of(self, wave: int, rank: int) -> RowGroup:
        """The group that `rank` runs in `wave`."""
        return next(group for group in self.waves[wave] if rank in group.ranks)

    @cached_property
    def starts(self) -> tuple[tuple[float, ...], ...]:
        """When each rank starts its row, in µs: [wave][rank]. A group starts when the last of its
        ranks is free."""
        clocks, found = [0.0] * self.request.world, []
        for wave in self.waves:
            row = [0.0] * self.request.world
            for group in wave:
                start = max(clocks[rank] for rank in group.ranks)
                for rank in group.ranks:
                    row[rank], clocks[rank] = start, start + group.us
            found.append(tuple(row))
        return tuple(found)

    @property
    def step_us(self) -> float:
        """Predicted time of the step: when the last rank is done."""
        return max(
            (
                group.us + self.starts[-1][group.first]
                for group in (self.waves[-1] if self.waves else ())
            ),
            default=0.0,
        )

    @property
    def barrier_us(self) -> float:
        """The same if all ranks waited for each other after every wave: no step takes longer."""
        return sum((max(group.us for group in wave) for wave in self.waves), start=0.0)

    @property
    def rank_us(self) -> tuple[float, ...]:
        """Predicted time that each rank works."""
        return tuple(
            sum((self.group_of(wave, rank).us for wave in range(len(self.waves))), start=0.0)
            for rank in range(self.request.world)
        )

    @property
    def balance(self) -> float:
        """Lower bound of the time over the predicted time: 1 is the best there can be."""
        return self.bound.step_us / self.step_us if self.waves else 1.0

    @property
    def tokens(self) -> int:
        """Tokens of the documents that have a place."""
        return sum(
            self.lengths[document]
            for wave in self.waves
            for group in wave
            for document in group.documents
        )

    @property
    def padding(self) -> float:
        """Share of the places for tokens that stay empty."""
        places = self.request.world * self.request.tokens * len(self.waves)
        return 1 - self.tokens / places if places else 0.0

    @property
    def buckets(self) -> tuple[tuple[int, Capacity], ...]:
        """The different (size, bucket) of the plan, which are variants of the graphs, largest
        first."""
        return tuple(
            sorted(
                {(group.size, group.bucket) for wave in self.waves for group in wave}, reverse=True
            )
        )


def plan_context(lengths: Sequence[int], request: ContextRequest) -> ContextPlan:
    """Place documents of these lengths, in order of arrival, for one step. Raises ValueError for
    what fits no group.

    With `request.waves` the step has at most so many: documents that come later, or find no room,
    are `left`. The first one never is, so that handing on what is left, at the front, starves
    nobody. (Longest first and best fit after Johnson 1974 and Graham 1969; groups of the size that
    a document needs and idle ranks' handling differ from Megatron-Core's scheduler, which fills one
    microbatch after the other and doubles groups until no rank is idle.)
    """
    found = request.read(lengths)
    if not found:
        return ContextPlan(request, (), (), (), lower_bound((), request))
    board, waves = _all_of(found, request)
    taken = _within(found, request, waves) if board is None else []
    while board is None:
        board = _search(taken, found, request, waves, partly=True)
        taken = taken[: max(len(taken) // 2, 1)]
    placed = sorted(board.row_of)
    bound = lower_bound([found[document] for document in placed], request)
    left = tuple(document for document in range(len(found)) if document not in board.row_of)
    return ContextPlan(request, found, _waves(board, waves), left, bound)


def _all_of(
    lengths: Sequence[int], request: ContextRequest
) -> tuple[ContextAssignment | None, int]:
    """Rows for all documents in the fewest waves, and these; None, and all waves there may be, if
    these are too few."""
    documents, fewest = range(len(lengths)), fewest_microsteps(lengths, request)
    most = len(lengths) + fewest if request.waves is None else request.waves
    for waves in range(fewest, most + 1):
        board = _search(documents, lengths, request, waves)
        if board is not None:
            return board, waves
    return None, most


def _within(lengths: Sequence[int], request: ContextRequest, waves: int) -> list[int]:
    """The documents in order of arrival that so many waves have places for: tokens and
    documents."""
    room = waves * request.world * request.tokens
    most = waves * request.world // request.sizes[0] * request.places[-1]
    taken: list[int] = []
    for document, length in enumerate(lengths):
        if length <= room and len(taken) < most:
            taken.append(document)
            room -= length
        elif len(taken) + WINDOW < document:
            break
    return taken


def _search(
    documents: Sequence[int],
    lengths: Sequence[int],
    request: ContextRequest,
    waves: int,
    *,
    partly: bool = False,
) -> ContextAssignment | None:
    """The best rows that any opening gives for so many waves.

    None if there are none for all documents; partly: for the first document.
    """
    order = sorted(documents, key=lambda document: (-lengths[document], document))
    best: ContextAssignment | None = None
    for opening in openings(order, lengths, request, waves):
        if best is not None and opening.least_us >= max(best.loads):
            break
        board = _built(opening, lengths, request, waves, documents if partly else None)
        if board is not None and (best is None or _per_token(board) < _per_token(best)):
            best = board
    return best


def _built(
    opening: Opening,
    lengths: Sequence[int],
    request: ContextRequest,
    waves: int,
    taken: Sequence[int] | None,
) -> ContextAssignment | None:
    """The board of an opening if it has a place for all documents; of those `taken`, and of later
    ones that fill its gaps, if it has one for the first of them."""
    board, left = build(opening, lengths, request, waves)
    if taken is None:
        return None if left else board
    known = set(taken) - set(left)
    candidates = range(min(len(lengths), taken[-1] + WINDOW))
    fill(board, [document for document in candidates if document not in known])
    return board if taken[0] in board.row_of else None


def _per_token(board: ContextAssignment) -> float:
    return max(board.loads) / max(1, sum(board.lengths[document] for document in board.row_of))


def _waves(board: ContextAssignment, waves: int) -> tuple[tuple[RowGroup, ...], ...]:
    """The rows as waves: every rank runs its larger groups first, and of one size the fullest
    first."""
    smallest, request = board.chain[0], board.request
    rows: list[OpenRow] = []
    for row in board.rows.values():
        # A group without documents is as many groups of the smallest size, which exchange least.
        rows += (
            [row]
            if row.documents
            else [
                OpenRow(row.number, smallest, first, 0, request.places[0])
                for first in range(row.first, row.first + row.size, smallest)
            ]
        )
    rows.sort(key=lambda row: (-row.size, -row.pairs, row.number, row.first))
    found: list[list[RowGroup]] = [[] for _ in range(waves)]
    used = [0] * request.world
    for row in rows:
        us = request.cost.row_us(row.size, request.tokens, row.places, row.pairs)
        bucket = request.bucket(row.size, len(row.documents))
        group = RowGroup(row.size, row.first, tuple(sorted(row.documents)), bucket, us)
        found[used[row.first]].append(group)
        for rank in group.ranks:
            used[rank] += 1
    return tuple(tuple(sorted(wave, key=lambda group: group.first)) for wave in found)
