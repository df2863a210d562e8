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

`lower_bound` is a bound of the time of a step that no plan is faster than:

Every rank runs as many rows as there are waves. A row of c ranks costs each of them at least g(c):
its shape with the fewest places for documents; the least of these is paid for every rank and wave.
What groups cost beyond it is shared out among the documents that need groups: a share f_c(length)
of a row of c ranks, where f_c is any function whose sum over the documents of such a row is at most
1. A document pays the least over the sizes that hold it, so all of them together never pay more
than the rows do. Besides length / (c · L) the steps of Fekete and Schepers (New classes of fast
lower bounds for bin packing problems, 2001) are tried: a row of 2 L has place for one document of
more than L. Attention adds up to the same work however it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf

from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.build import (
    ContextAssignment,
    Opening,
    OpenRow,
    build,
    fill,
    openings,
)
from packgraph.parallel.context.request import ContextRequest

MOST_STEPS = 7
ROUNDING = 1e-9
WINDOW = 256  # documents beyond the tokens of a step that may fill its gaps


@dataclass(frozen=True)
class ContextBound:
    """Waves that the documents need at least, and microseconds that the step takes at least."""

    waves: int
    step_us: float


def lower_bound(lengths: Sequence[int], request: ContextRequest, waves: int = 0) -> ContextBound:
    """The bound for documents of these lengths, each of which must fit, in `waves` or more. Without
    any: no waves."""
    if not lengths:
        return ContextBound(0, 0.0)
    waves, cost, tokens = (
        max(waves, fewest_microsteps(lengths, request)),
        request.cost,
        request.tokens,
    )
    alone = {size: cost.row_us(size, tokens, request.places[0], 0.0) for size in request.sizes}
    least = min(alone.values())
    rows = request.world * waves * least + _groups(
        _long(lengths, request), request, {size: alone[size] - least for size in request.sizes}
    )
    bare = min(cost.base_us(size, tokens) for size in request.sizes)
    # Every document has a place of its own: its c ranks together pay c · place_us(c), least for the
    # smallest groups.
    places = len(lengths) * min(size * cost.place_us(size, tokens) for size in request.sizes)
    pairs = cost.attention_us * sum(length * length for length in lengths)
    work = max(rows, request.world * waves * bare + places) + pairs
    longest = max(lengths)
    one = min(
        cost.row_us(size, tokens, request.places[0], longest * longest)
        for size in request.sizes
        if size >= request.needed(longest)
    )
    return ContextBound(waves, max(work / request.world, one + (waves - 1) * least))


def _groups(lengths: Sequence[int], request: ContextRequest, extra: dict[int, float]) -> float:
    """What groups that hold these documents cost at least; extra: what a row of each size costs
    each of its ranks."""
    larger = [size for size in request.sizes if size > request.sizes[0]]
    if not lengths:
        return 0.0

    def prices(size: int, steps: int) -> list[float]:
        room, row = size * request.tokens, size * extra[size]
        return [_share(length, room, steps) * row if length <= room else inf for length in lengths]

    # Every choice of functions is a bound; they are tried one size after the other.
    chosen = {size: prices(size, 0) for size in larger}
    best = sum(map(min, zip(*chosen.values())), start=0.0)
    for size in larger:
        for steps in range(1, min(size, MOST_STEPS + 1)):
            tried = chosen | {size: prices(size, steps)}
            found = sum(map(min, zip(*tried.values())), start=0.0)
            if found > best:
                best, chosen = found, tried
    return best


def _share(length: int, room: int, steps: int) -> float:
    """Part of a row with `room` tokens: its tokens for 0 steps, else how many of `steps` it
    takes."""
    if not steps or (steps + 1) * length % room == 0:
        return length / room
    return (steps + 1) * length // room / steps


def fewest_microsteps(lengths: Sequence[int], request: ContextRequest) -> int:
    """Waves that no plan can do without: by tokens, by places for documents, by ranks in groups for
    long documents."""
    by_tokens = ceil(sum(lengths) / (request.tokens * request.world))
    by_places = ceil(len(lengths) / (request.places[-1] * (request.world // request.sizes[0])))
    # What groups cost if a rank and wave costs 1: so many of these they take.
    in_groups = _groups(_long(lengths, request), request, dict.fromkeys(request.sizes, 1.0))
    return max(by_tokens, by_places, ceil(in_groups / request.world - ROUNDING))


def _long(lengths: Sequence[int], request: ContextRequest) -> list[int]:
    return [length for length in lengths if length > request.sizes[0] * request.tokens]


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
