"""No plan is faster than this: a lower bound of the time of a step, whatever documents share rows
and groups.

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
from math import ceil, inf

from packgraph.parallel.context.request import ContextRequest

MOST_STEPS = 7
ROUNDING = 1e-9


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
