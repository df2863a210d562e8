"""No plan is faster than this: a lower bound of the time of a step, whatever documents share rows and groups.

Every rank runs as many rows as there are waves. A row of c ranks costs each of them at least g(c): its shape with the
fewest places for documents; the least of these is paid for every rank and wave. What groups cost beyond it is shared
out among the documents that need groups: a share f_c(length) of a row of c ranks, where f_c is any function whose sum
over the documents of such a row is at most 1. A document pays the least over the sizes that hold it, so all of them
together never pay more than the rows do. Besides length / (c · L) the steps of Fekete and Schepers (New classes of
fast lower bounds for bin packing problems, 2001) are tried: a row of 2 L has place for one document of more than L.
Attention adds up to the same work however it is cut.
"""
from collections.abc import Sequence
from dataclasses import dataclass

from packgraph.plan.context_request import ContextRequest

MOST_STEPS = 7


@dataclass(frozen=True)
class ContextBound:
    """Waves that the documents need at least, and microseconds that the step takes at least."""

    waves: int
    step_us: float


def lower_bound(lengths: Sequence[int], request: ContextRequest, waves: int = 0) -> ContextBound:
    """The bound for documents of these lengths, each of which must fit, in `waves` or more. Without any: no waves."""
    if not lengths:
        return ContextBound(0, 0.0)
    waves, cost, tokens = max(waves, fewest_waves(lengths, request)), request.cost, request.tokens
    alone = {size: cost.row_us(size, tokens, request.places[0], 0.0) for size in request.sizes}
    least = min(alone.values())
    rows = request.world * waves * least + _groups_us(
        [length for length in lengths if request.needed(length) > request.sizes[0]], request,
        {size: alone[size] - least for size in request.sizes})
    bare = min(cost.base_us(size, tokens) for size in request.sizes)
    # Every document has a place of its own: its c ranks together pay c · place_us(c), least for the smallest groups.
    places = len(lengths) * min(size * cost.place_us(size, tokens) for size in request.sizes)
    pairs = cost.attention_us * sum(length * length for length in lengths)
    work = max(rows, request.world * waves * bare + places) + pairs
    longest = max(lengths)
    one = min(cost.row_us(size, tokens, request.places[0], longest * longest) for size in request.sizes
              if size >= request.needed(longest))
    return ContextBound(waves, max(work / request.world, one + (waves - 1) * least))


def _groups_us(lengths: Sequence[int], request: ContextRequest, extra: dict[int, float]) -> float:
    """What rows that hold these documents cost all ranks beyond `least`; extra: of a row of each size, on each rank."""
    larger = [size for size in request.sizes if size > request.sizes[0]]
    steps = dict.fromkeys(larger, 0)  # which function shares out a size: 0 is length / (size · tokens)

    def price(length: int) -> float:
        return min(_share(length, size * request.tokens, steps[size]) * size * extra[size] for size in larger
                   if size * request.tokens >= length)

    # Every choice is a bound; they are tried one size after the other.
    best = sum((price(length) for length in lengths), start=0.0)
    for size in larger:
        for step in range(1, min(size, MOST_STEPS + 1)):
            before, steps[size] = steps[size], step
            found = sum((price(length) for length in lengths), start=0.0)
            if found > best:
                best = found
            else:
                steps[size] = before
    return best


def _share(length: int, room: int, steps: int) -> float:
    """Part of a row with `room` tokens: its tokens for 0 steps, else how many of `steps` it takes."""
    if not steps or (steps + 1) * length % room == 0:
        return length / room
    return (steps + 1) * length // room / steps


def fewest_waves(lengths: Sequence[int], request: ContextRequest) -> int:
    """Waves that no plan can do without: by tokens, by places for documents, by the groups that long ones need."""
    most = request.places[-1]
    slots = [_slots_of(size, lengths, request) for size in request.sizes]
    by_places = -(-len(lengths) // (most * (request.world // request.sizes[0])))
    return max(by_places, *(-(-slot // request.world) for slot in slots))


def _slots_of(size: int, lengths: Sequence[int], request: ContextRequest) -> int:
    """Places (rank, wave) that rows of at least `size` ranks take, for the documents that need so many."""
    tokens = sum(length for length in lengths if request.needed(length) >= size)
    return -(-tokens // request.tokens)
