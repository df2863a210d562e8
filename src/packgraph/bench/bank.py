"""Banks of several buckets in one slot, and shapes to fill them: what `bench memory` and `bench
capture` measure."""

from packgraph.bench.models import draw_batches
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity


def bank_shapes(tokens: int, documents: int, buckets: int) -> tuple[Capacity, ...]:
    """`buckets` capacities in equal steps up to `tokens` tokens, ascending."""
    return tuple(Capacity(tokens * step // buckets, documents) for step in range(1, buckets + 1))


def one_each(
    shapes: tuple[Capacity, ...], vocabulary: int, *, mean: float, sigma: float, seed: int
) -> list[PackedBatch]:
    """A microbatch for each shape, largest first."""
    return [
        draw_batches(capacity, 1, vocabulary, mean=mean, sigma=sigma, seed=seed)[0]
        for capacity in reversed(shapes)
    ]
