"""Bins for documents of more tokens than one rank has: how many ranks share a row, and which
documents.

Rows of several ranks pay for the exchange of heads, whatever is in them, so these documents should
fill them. Two rules make bins. *Best fit*: longest first, into the bin that has least room left
(Johnson 1974), new bins of one least size. *Snug*: the longest document and those that fill its bin
best with it (exact, a subset sum over sets of bits), in the size that costs least per token filled
(after the minimum bin slack of Gupta and Ho 1999). What costs least is built.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packgraph.parallel.context.request import ContextRequest

Bin = tuple[int, list[int]]  # ranks that share it, documents
Extra = Callable[
    [int], float
]  # µs of a row of so many ranks on each of them, beyond a row of the smallest size
PARTNERS = 40  # documents that a subset sum is over


@dataclass(frozen=True)
class Opening:
    """What a plan begins with. chain: sizes that divide one another, ascending. smallest: of them,
    the least size of any row. bins: rows that are larger than that. alone: other documents, longest
    first. least_us: no rank's time can be less than this with these bins, in the waves they were
    made for.
    """

    chain: tuple[int, ...]
    smallest: int
    bins: tuple[Bin, ...]
    alone: tuple[int, ...]
    least_us: float


def openings(
    order: Sequence[int], lengths: Sequence[int], request: ContextRequest, waves: int
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
            if len(larger) > 1 and shared:
                ways.append(
                    _snug(shared, lengths, request, larger, lambda size: _extra(request, size))
                )
            for bins in ways:
                shrunk = tuple(
                    (
                        _allowed(
                            larger, sum(lengths[document] for document in documents), request.tokens
                        ),
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
                            waves,
                        ),
                    )
                )
    return sorted(
        found, key=lambda opening: (opening.least_us, opening.smallest, len(opening.bins))
    )


def _least_us(
    bins: Sequence[Bin], smallest: int, lengths: Sequence[int], request: ContextRequest, waves: int
) -> float:
    cost = request.cost
    base = cost.row_us(smallest, request.tokens, request.places[0], 0.0)
    groups = sum(
        size * (cost.row_us(size, request.tokens, request.places[0], 0.0) - base)
        for size, _ in bins
    )
    # Rows that stay empty need not be larger than the smallest size there is.
    pairs = cost.attention_us * sum(length * length for length in lengths)
    return base * waves + (groups + pairs) / request.world


def _extra(request: ContextRequest, size: int) -> float:
    return request.cost.base_us(size, request.tokens) - request.cost.base_us(
        request.sizes[0], request.tokens
    )


def _allowed(sizes: Sequence[int], tokens: int, per_rank: int) -> int:
    return next(size for size in sizes if size * per_rank >= tokens)


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
            bins.append((max(least, _allowed(sizes, length, request.tokens)), []))
            room = bins[index][0] * request.tokens
        bins[index][1].append(document)
        if len(bins[index][1]) < request.places[-1]:
            insort(rooms, (room - length, index))
    return bins


def _snug(
    order: Sequence[int],
    lengths: Sequence[int],
    request: ContextRequest,
    sizes: Sequence[int],
    extra: Extra,
) -> list[Bin]:
    """Bins one after another: each has the longest document that is left and the best company in
    the best size."""
    waiting, bins = list(order), []
    while waiting:
        longest, others = waiting[0], waiting[1:]
        found: list[tuple[float, float, int, list[int]]] = []
        for size in sizes:
            room = size * request.tokens - lengths[longest]
            if room >= 0:
                company = fullest(others, lengths, room)[: request.places[-1] - 1]
                filled = lengths[longest] + sum(lengths[document] for document in company)
                found.append((size * extra(size) / filled, -filled / size, size, company))
        _, _, size, company = min(found)
        taken = {longest, *company}
        bins.append((size, [longest, *company]))
        waiting = [document for document in waiting if document not in taken]
    return bins


def fullest(documents: Sequence[int], lengths: Sequence[int], room: int) -> list[int]:
    """Documents whose tokens come closest to `room` from below; of several choices one with the
    first documents.

    documents: longest first; of more than PARTNERS only the longest and the shortest are looked at,
    large pieces and what closes gaps. Bit n of a set of bits says whether some of them have n
    tokens together.
    """
    if len(documents) > PARTNERS:
        documents = [*documents[: PARTNERS // 2], *documents[-PARTNERS // 2 :]]
    mask, sums = (1 << (room + 1)) - 1, [1]
    for document in reversed(documents):
        sums.append((sums[-1] | sums[-1] << lengths[document]) & mask)
    tokens, chosen = sums[-1].bit_length() - 1, []
    for document, without in zip(documents, reversed(sums[:-1])):
        rest = tokens - lengths[document]
        if rest >= 0 and without >> rest & 1:
            chosen.append(document)
            tokens = rest
    return chosen
