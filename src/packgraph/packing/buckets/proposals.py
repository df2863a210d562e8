"""Sets of buckets that may be best, and the judge who packs a sample into them."""

from collections.abc import Iterator, Sequence

from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.buckets.cover import covering_sizes
from packgraph.packing.buckets.packing import pack_sample
from packgraph.packing.buckets.request import BucketRequest
from packgraph.packing.buckets.sets import (
    Corner,
    Fills,
    Grid,
    best_set,
    cost_of,
    grid_of,
)
from packgraph.packing.capacity import Capacity

# Caps on the documents of a row are tried at these shares of the rows; what a cap costs in padding
# the packer shows.
CAPS = (1.0, 0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.6)
PRUNED_AGAIN = 2
PLACES = CostModel(microbatch_us=0, token_us=1, document_us=0, tile_us=0, attention_us=0)


class Judge:
    """Says what buckets cost by packing a sample into them."""

    def __init__(self, lengths: Sequence[int], request: BucketRequest) -> None:
        self.lengths, self.request = lengths, request
        self._known: dict[tuple[Corner, ...], Fills] = {}

    def fills(self, corners: Sequence[Corner]) -> Fills:
        """The rows of the sample. Those of a stream follow from the largest bucket alone: no other
        has more room."""
        key = tuple(corners) if self.request.policy.batches else (max(corners),)
        if key not in self._known:
            capacities = [Capacity(*corner) for corner in key]
            self._known[key] = pack_sample(self.lengths, capacities, self.request.policy).all_fills
        return self._known[key]

    def cost(self, corners: Sequence[Corner]) -> float:
        """Microseconds of the sample's rows; without attention proper, which does not depend on
        them."""
        return cost_of(corners, self.fills(corners), self.request.cost)

    def pruned(self, corners: tuple[Corner, ...]) -> tuple[Corner, ...]:
        """`corners` without those that save too little, neither time nor places; never without the
        largest.

        Places count too, where the model says that they cost nothing: a model of costs may be wrong
        about a machine.
        """
        costs = (self.request.cost, PLACES)
        limits = [
            cost_of(corners, self.fills(corners), cost) * (1 + self.request.worth) for cost in costs
        ]

        def growth(rest: tuple[Corner, ...], fills: Fills) -> float:
            return max(cost_of(rest, fills, cost) / limit for cost, limit in zip(costs, limits))

        while len(corners) > 1:
            rests = [corners[:index] + corners[index + 1 :] for index in range(len(corners) - 1)]
            # Packed again are only those that would grow least if the rows stayed as they are.
            fills = self.fills(corners)
            rests = sorted(rests, key=lambda rest: growth(rest, fills))[:PRUNED_AGAIN]
            least, rest = min((growth(rest, self.fills(rest)), rest) for rest in rests)
            if least > 1:
                break
            corners = rest
        return corners


def proposals(judge: Judge, top_tokens: int, most: int) -> Iterator[tuple[Corner, ...]]:
    """Sets of at most `most` corners, the largest of `top_tokens` tokens; at least one."""
    kind = _batch_proposals if judge.request.policy.batches else _stream_proposals
    return kind(judge, top_tokens, most)


def _stream_proposals(judge: Judge, top_tokens: int, most: int) -> Iterator[tuple[Corner, ...]]:
    """The best set for each cap on the documents of a row."""
    request = judge.request
    for cap in _caps(judge.fills([(top_tokens, top_tokens)])):
        top = (top_tokens, cap)
        fills = judge.fills([top])
        yield best_set(fills, grid_of(fills, top, request.multiple), request.cost, most).corners


def _batch_proposals(judge: Judge, top_tokens: int, most: int) -> Iterator[tuple[Corner, ...]]:
    """The best set for rows as the largest bucket alone gives them, and for each number of sizes
    with close sums."""
    request, each = judge.request, judge.request.policy.documents
    fills = judge.fills([(top_tokens, top_tokens)])
    documents = max(documents for _, documents in fills)
    grid = grid_of(fills, (top_tokens, documents), request.multiple)
    yield best_set(fills, grid, request.cost, most).corners
    batches = [
        sum(judge.lengths[start : start + each]) for start in range(0, len(judge.lengths), each)
    ]
    for count in range(2, most + 1):
        sizes = covering_sizes(batches, top_tokens, count, request.multiple)
        fills = judge.fills([(size, documents) for size in sizes])
        top = (top_tokens, max(documents for _, documents in fills))
        grid = Grid(sizes, grid_of(fills, top, request.multiple).documents)
        yield best_set(fills, grid, request.cost, most).corners


def _caps(natural: Fills) -> list[int]:
    """Documents that these shares of the rows do not exceed, most first."""
    counts = sorted(documents for (_, documents), rows in natural.items() for _ in range(rows))
    return sorted(
        {counts[min(len(counts) - 1, int(share * len(counts)))] for share in CAPS}, reverse=True
    )
