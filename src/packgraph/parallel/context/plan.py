"""Dynamic context parallelism: which documents share a row, on how many ranks, in which microbatch
of the step.

A microstep is a microbatch of all ranks: each runs one row, alone or in a group, so that groups of
a microstep cover all ranks once. Microsteps come with large groups first. Groups wait for each
other only where their ranks meet in a later group:

    rank 0  [ c=4   ][ c=2  ][1]         a rank runs its groups as soon as their ranks are free;
    rank 1  [ c=4   ][ c=2  ][1 ]        with nested blocks, large ones first, that is at once:
    rank 2  [ c=4   ][1 ][ 1  ]          the step takes as long as the largest sum of a rank
    rank 3  [ c=4   ][ 1 ][1]

Everything follows from integers and from sums of floats in one order, so all ranks find the same
plan.

`lower_bound` is a bound of the time of a step that no plan is faster than:

Every rank runs as many rows as there are microsteps. A row of c ranks costs each of them at least
g(c): its shape with the fewest places for documents; the least of these is paid for every rank and
microstep. What groups cost beyond it is shared out among the documents that need groups: a share
f_c(length) of a row of c ranks, where f_c is any function whose sum over the documents of such a
row is at most 1. A document pays the least over the sizes that hold it, so all of them together
never pay more than the rows do. Besides length / (c · L) the steps of Fekete and Schepers (New
classes of fast lower bounds for bin packing problems, 2001) are tried: a row of 2 L has place for
one document of more than L. Attention adds up to the same work however it is cut.
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
    """Microsteps that the documents need at least, and microseconds that the step takes at
    least."""

    microsteps: int
    step_us: float


def lower_bound(
    lengths: Sequence[int], request: ContextRequest, microsteps: int = 0
) -> ContextBound:
    """The bound for documents of these lengths, each of which must fit, in `microsteps` or more.
    Without any: no microsteps."""
    if not lengths:
        return ContextBound(0, 0.0)
    microsteps, cost, tokens = (
        max(microsteps, fewest_microsteps(lengths, request)),
        request.cost,
        request.tokens,
    )
    alone = {size: cost.row_us(size, tokens, request.places[0], 0.0) for size in request.sizes}
    least = min(alone.values())
    rows = request.world * microsteps * least + _groups(
        _long(lengths, request), request, {size: alone[size] - least for size in request.sizes}
    )
    bare = min(cost.row_us(size, tokens, 0, 0.0) for size in request.sizes)
    # Every document has a place of its own: its c ranks together pay c · place_us(c), least for the
    # smallest groups.
    places = len(lengths) * min(size * cost.place_us(size, tokens) for size in request.sizes)
    pairs = cost.attention_us * sum(length * length for length in lengths)
    work = max(rows, request.world * microsteps * bare + places) + pairs
    longest = max(lengths)
    one = min(
        cost.row_us(size, tokens, request.places[0], longest * longest)
        for size in request.sizes
        if size >= request.needed(longest)
    )
    return ContextBound(microsteps, max(work / request.world, one + (microsteps - 1) * least))


def _groups(lengths: Sequence[int], request: ContextRequest, extra: dict[int, float]) -> float:
    """Lower bound of the cost of groups that hold these documents; extra: what a row of each size
    costs each of its ranks."""
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
    """Microsteps that no plan can do without: by tokens, by places for documents, by ranks in
    groups for long documents."""
    by_tokens = ceil(sum(lengths) / (request.tokens * request.world))
    by_places = ceil(len(lengths) / (request.places[-1] * (request.world // request.sizes[0])))
    # What groups cost if a rank and microstep costs 1: so many of these they take.
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
    """Microsteps of groups by first rank, for documents of `lengths`; `left`: documents that wait
    for the next step."""

    request: ContextRequest
    lengths: tuple[int, ...]
    microsteps: tuple[tuple[RowGroup, ...], ...]
    left: tuple[int, ...]
    bound: ContextBound

    def group_of(self, microstep: int, rank: int) -> RowGroup:
        """The group that `rank` runs in `microstep`."""
        return next(group for group in self.microsteps[microstep] if rank in group.ranks)

    @cached_property
    def starts(self) -> tuple[tuple[float, ...], ...]:
        """Starts of each rank's row, in µs: [microstep][rank]. A group starts when the last of its
        ranks is free."""
        clocks, found = [0.0] * self.request.world, []
        for microstep in self.microsteps:
            row = [0.0] * self.request.world
            for group in microstep:
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
                for group in (self.microsteps[-1] if self.microsteps else ())
            ),
            default=0.0,
        )

    @property
    def barrier_us(self) -> float:
        """The same if all ranks waited for each other after every microstep: no step takes
        longer."""
        return sum(
            (max(group.us for group in microstep) for microstep in self.microsteps), start=0.0
        )

    @property
    def rank_us(self) -> tuple[float, ...]:
        """Predicted time that each rank works."""
        return tuple(
            sum(
                (self.group_of(microstep, rank).us for microstep in range(len(self.microsteps))),
                start=0.0,
            )
            for rank in range(self.request.world)
        )

    @property
    def balance(self) -> float:
        """Lower bound of the time over the predicted time: 1 is the best there can be."""
        return self.bound.step_us / self.step_us if self.microsteps else 1.0

    @property
    def tokens(self) -> int:
        """Tokens of the documents that have a place."""
        return sum(
            self.lengths[document]
            for microstep in self.microsteps
            for group in microstep
            for document in group.documents
        )

    @property
    def padding(self) -> float:
        """Share of the places for tokens that stay empty."""
        places = self.request.world * self.request.tokens * len(self.microsteps)
        return 1 - self.tokens / places if places else 0.0

    @property
    def buckets(self) -> tuple[tuple[int, Capacity], ...]:
        """The different (size, bucket) of the plan, which are variants of the graphs, largest
        first."""
        return tuple(
            sorted(
                {
                    (group.size, group.bucket)
                    for microstep in self.microsteps
                    for group in microstep
                },
                reverse=True,
            )
        )


def plan_context(lengths: Sequence[int], request: ContextRequest) -> ContextPlan:
    """Place documents of these lengths, in order of arrival, for one step. Raises ValueError for
    what fits no group.

    With `request.microsteps` the step has at most so many: documents that come later, or find no
    room, are `left`. The first one never is, so that handing on what is left, at the front, starves
    nobody. (Longest first and best fit after Johnson 1974 and Graham 1969; groups of the size that
    a document needs and idle ranks' handling differ from Megatron-Core's scheduler, which fills one
    microbatch after the other and doubles groups until no rank is idle.)
    """
    found = request.read(lengths)
    if not found:
        return ContextPlan(request, (), (), (), lower_bound((), request))
    assignment, microsteps = _all_of(found, request)
    taken = _within(found, request, microsteps) if assignment is None else []
    while assignment is None:
        assignment = _search(taken, found, request, microsteps, partly=True)
        taken = taken[: max(len(taken) // 2, 1)]
    placed = sorted(assignment.row_of)
    bound = lower_bound([found[document] for document in placed], request)
    left = tuple(document for document in range(len(found)) if document not in assignment.row_of)
    return ContextPlan(request, found, _microsteps(assignment, microsteps), left, bound)


def _all_of(
    lengths: Sequence[int], request: ContextRequest
) -> tuple[ContextAssignment | None, int]:
    """Rows for all documents in the fewest microsteps, and these; None, and all microsteps there
    may be, if these are too few."""
    documents, fewest = range(len(lengths)), fewest_microsteps(lengths, request)
    most = len(lengths) + fewest if request.microsteps is None else request.microsteps
    for microsteps in range(fewest, most + 1):
        assignment = _search(documents, lengths, request, microsteps)
        if assignment is not None:
            return assignment, microsteps
    return None, most


def _within(lengths: Sequence[int], request: ContextRequest, microsteps: int) -> list[int]:
    """The documents in order of arrival that so many microsteps have places for: tokens and
    documents."""
    room = microsteps * request.world * request.tokens
    most = microsteps * request.world // request.sizes[0] * request.places[-1]
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
    microsteps: int,
    *,
    partly: bool = False,
) -> ContextAssignment | None:
    """The best rows that any opening gives for so many microsteps.

    None if there are none for all documents; partly: for the first document.
    """
    order = sorted(documents, key=lambda document: (-lengths[document], document))
    best: ContextAssignment | None = None
    for opening in openings(order, lengths, request, microsteps):
        if best is not None and opening.least_us >= max(best.loads):
            break
        assignment = _built(opening, lengths, request, microsteps, documents if partly else None)
        if assignment is not None and (best is None or _per_token(assignment) < _per_token(best)):
            best = assignment
    return best


def _built(
    opening: Opening,
    lengths: Sequence[int],
    request: ContextRequest,
    microsteps: int,
    taken: Sequence[int] | None,
) -> ContextAssignment | None:
    """The assignment of an opening if it has a place for all documents; of those `taken`, and of
    later ones that fill its gaps, if it has one for the first of them."""
    assignment, left = build(opening, lengths, request, microsteps)
    if taken is None:
        return None if left else assignment
    known = set(taken) - set(left)
    candidates = range(min(len(lengths), taken[-1] + WINDOW))
    fill(assignment, [document for document in candidates if document not in known])
    return assignment if taken[0] in assignment.row_of else None


def _per_token(assignment: ContextAssignment) -> float:
    return max(assignment.loads) / max(
        1, sum(assignment.lengths[document] for document in assignment.row_of)
    )


def _microsteps(assignment: ContextAssignment, microsteps: int) -> tuple[tuple[RowGroup, ...], ...]:
    """The rows as microsteps: every rank runs its larger groups first, and of one size the fullest
    first."""
    smallest, request = assignment.chain[0], assignment.request
    rows: list[OpenRow] = []
    for row in assignment.rows:
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
    found: list[list[RowGroup]] = [[] for _ in range(microsteps)]
    used = [0] * request.world
    for row in rows:
        us = request.cost.row_us(row.size, request.tokens, row.places, row.pairs)
        bucket = request.bucket(row.size, len(row.documents))
        group = RowGroup(row.size, row.first, tuple(sorted(row.documents)), bucket, us)
        found[used[row.first]].append(group)
        for rank in group.ranks:
            used[rank] += 1
    return tuple(tuple(sorted(microstep, key=lambda group: group.first)) for microstep in found)
