"""The buckets that a run on documents of these lengths would choose for itself
(packing/buckets/planner.py)."""

from packgraph.bench.models import WINDOW, draw_lengths
from packgraph.models.config import DecoderConfig
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketRequest, choose_buckets
from packgraph.packing.capacity import Capacity
from packgraph.train.auto_capacities import FEWEST_SIZES, MULTIPLES
from packgraph.train.decoder_estimates import decoder_cost

SEEN = 4000  # documents that are planned by; the benchmark's own are others
ANOTHER_SEED = 1_000_003


def bucket_request(config: DecoderConfig, tokens: int, most: int, attention: str) -> BucketRequest:
    """At most `most` buckets for rows of at most `tokens` tokens, packed as the trainer does.

    attention: the backend, which says what a place for a document costs.
    """
    multiple = next(
        tile
        for tile in MULTIPLES
        if tokens % tile == 0 and (tile == 1 or tokens >= FEWEST_SIZES * tile)
    )
    return BucketRequest(
        policy=PackingPolicy(documents=WINDOW),
        max_tokens=tokens,
        max_buckets=most,
        multiple=multiple,
        layers=config.num_layers,
        cost=decoder_cost(config, measured=FLASH4 if attention == "flash" else CostModel()),
    )


def planned_buckets(
    request: BucketRequest, documents: int | None, *, mean: float, sigma: float, seed: int
) -> tuple[Capacity, ...]:
    """The buckets for lognormal lengths, ascending; the last one holds what all others hold.

    documents: the most that a row may have; None leaves that to the lengths.
    """
    lengths = draw_lengths(
        SEEN, request.max_tokens, mean=mean, sigma=sigma, seed=seed + ANOTHER_SEED
    )
    found = choose_buckets(LengthHistogram.of(lengths), request).capacities
    most = max(bucket.documents for bucket in found) if documents is None else documents
    largest = Capacity(request.max_tokens, most)
    return tuple(
        sorted(
            {Capacity(bucket.tokens, min(bucket.documents, most)) for bucket in found} | {largest}
        )
    )
