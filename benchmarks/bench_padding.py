"""`bench padding`: how much of the places for tokens stays empty in the buckets that the
planner chooses.

Buckets are chosen from one draw of lengths and measured on another, by really packing it. Needs no
device.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import numpy as np
import torch
from bench_step import KILO, BenchArguments
from numpy.typing import NDArray

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Column, Row, Rows, value
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketRequest, choose_buckets, measure
from packgraph.train.config.reading import Count, option

Draw = Callable[[int, np.random.Generator], NDArray[np.float64]]
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


def _lognormal(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Mean 1024, sigma 1.5."""
    return draw.lognormal(math.log(1024) - 1.5**2 / 2, 1.5, count)


def _chat(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Single turns, talks of several turns, and turns with something long pasted in."""
    kind = draw.choice(3, size=count, p=[0.6, 0.33, 0.07])
    return draw.lognormal(np.log([220, 900, 3500])[kind], np.array([0.8, 0.8, 0.6])[kind])


def _code(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Files, one in twelve of them longer than 8192 tokens."""
    return draw.lognormal(math.log(900), 1.6, count)


DISTRIBUTIONS: Mapping[str, Draw] = MappingProxyType(
    {"lognormal": _lognormal, "chat": _chat, "code": _code}
)


def lengths_like(name: str, count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths of the family called `name`, those above `longest` cut there."""
    drawn = DISTRIBUTIONS[name](count, np.random.default_rng(seed))
    return [int(length) for length in np.clip(np.round(drawn), 1, longest)]


@dataclass(frozen=True, kw_only=True)
class PaddingArguments(BenchArguments):
    """Places for tokens that stay empty in chosen buckets; needs no device."""

    ways: tuple[Annotated[str, tuple(DISTRIBUTIONS)], ...] = option(
        tuple(DISTRIBUTIONS), "families of lengths"
    )
    tokens: Count = option(8 * KILO, "of the largest bucket", metavar="T")
    buckets: Count = option(8, "at most", metavar="K")
    documents: Count = option(20_000, "of a draw", metavar="N")


def bench_padding(
    options: PaddingArguments, device: torch.device, rows: Rows, deadline: Deadline
) -> None:
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


def _measure(options: PaddingArguments, way: str, policy: PackingPolicy) -> Row:
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
