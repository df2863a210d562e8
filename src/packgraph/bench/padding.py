"""`packgraph bench padding`: how much of the places for tokens stays empty in the buckets that the
planner chooses.

Buckets are chosen from one draw of lengths and measured on another, by really packing it. Needs no
device.

`planned_buckets` are those that a run on documents of such lengths would choose for itself.
"""

import time
from dataclasses import dataclass

from packgraph.bench.models import WINDOW, draw_lengths, lengths_like
from packgraph.bench.rows import Column, Row, Rows, value
from packgraph.bench.timing import Deadline
from packgraph.models.config import DecoderConfig
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketRequest, choose_buckets, measure
from packgraph.packing.capacity import Capacity
from packgraph.train.auto_capacities import FEWEST_SIZES, MULTIPLES
from packgraph.train.decoder_estimates import decoder_cost

SEEN = 4000  # documents that are planned by; the benchmark's own are others
ANOTHER_SEED = 1_000_003
POLICIES = (
    PackingPolicy(),
    *(PackingPolicy(documents=count, batches=True) for count in (64, 32, 16)),
)
MULTIPLE = 64
COLUMNS: list[Column] = [
    ("lengths", value("way")),
    ("packed", value("packed")),
    ("buckets", lambda row: str(len(row["buckets"]))),
    ("padding", value("padding", ".2%")),
    ("largest alone", value("padding_alone", ".2%")),
    ("time above none", value("above_bound", ".1%")),
    ("largest alone", value("above_bound_alone", ".1%")),
    ("planned in s", value("seconds", ".1f")),
]


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


@dataclass(frozen=True)
class PaddingOptions:
    """What to measure. tokens: of the largest bucket, and of the longest document. buckets: how
    many at most.

    documents: of each draw.
    """

    ways: tuple[str, ...]
    tokens: int = 8192
    buckets: int = 8
    documents: int = 20_000
    seed: int = 0


def bench_padding(options: PaddingOptions, rows: Rows, deadline: Deadline) -> None:
    """One row for each family of lengths and each way of packing."""
    for way in options.ways:
        for policy in POLICIES:
            row = {
                "benchmark": "padding",
                "way": way,
                "tokens": options.tokens,
                "documents": options.documents,
                "seed": options.seed,
                "packed": f"{policy.documents} at a time"
                if policy.batches
                else f"window of {policy.documents}",
            }
            found = (
                {"buckets": [], "reason": deadline.reason}
                if deadline.passed()
                else _measure(options, way, policy)
            )
            rows.add(row | found)


def _measure(options: PaddingOptions, way: str, policy: PackingPolicy) -> Row:
    seen, unseen = (
        lengths_like(way, options.documents, options.tokens, 2 * options.seed + draw)
        for draw in (0, 1)
    )
    request = BucketRequest(
        policy=policy,
        max_tokens=options.tokens,
        max_buckets=options.buckets,
        multiple=min(MULTIPLE, options.tokens),
    )
    began = time.perf_counter()
    plan = choose_buckets(LengthHistogram.of(seen), request)
    seconds = time.perf_counter() - began
    chosen, alone = (
        measure(buckets, unseen, policy) for buckets in (plan.capacities, plan.capacities[-1:])
    )
    return {
        "buckets": [f"{bucket.tokens}x{bucket.documents}" for bucket in plan.capacities],
        "padding": round(chosen.padding, 6),
        "padding_alone": round(alone.padding, 6),
        "above_bound": round(chosen.above_bound(request.cost), 5),
        "above_bound_alone": round(alone.above_bound(request.cost), 5),
        "seconds": round(seconds, 2),
        "reason": None,
    }
