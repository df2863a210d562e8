"""Buckets from a histogram: little padding for documents that the plan has not seen, within the
budget, the same twice.

Padding is measured by packing documents of a second, independent draw with `packgraph.pack` and
`pack_stream`.
"""

from dataclasses import replace
from math import log

import numpy as np
import pytest

from packgraph.packing.buckets.cost import FLASH4, CostModel, LinearMemory
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy, pack_sample
from packgraph.packing.buckets.planner import (
    BucketRequest,
    Judge,
    batch_proposals,
    choose_buckets,
    measure,
    stream_proposals,
    within_budget,
)
from packgraph.packing.buckets.sets import covering_places, covering_sizes
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.packing.pack import PackReport, pack, pack_stream

pytest.importorskip("hypothesis")
from hypothesis import given, settings, strategies

GOAL = 0.02
LONGEST = 8192
STREAM = PackingPolicy()
COUNTS = strategies.dictionaries(
    strategies.integers(1, 300), strategies.integers(1, 20), min_size=1, max_size=12
)


def lognormal(count, seed):
    return np.random.default_rng(seed).lognormal(log(1024) - 1.5**2 / 2, 1.5, count)


def chat(count, seed):
    """Single turns, talks of several turns, and turns with something long pasted in."""
    draw = np.random.default_rng(seed)
    kind = draw.choice(3, size=count, p=[0.6, 0.33, 0.07])
    return draw.lognormal(np.log([220, 900, 3500])[kind], np.array([0.8, 0.8, 0.6])[kind])


def code(count, seed):
    """Files, one in twelve of them longer than anything allowed and so cut at the limit."""
    return np.random.default_rng(seed).lognormal(log(900), 1.6, count)


KINDS = {"lognormal": lognormal, "chat": chat, "code": code}


def lengths_of(kind, count, seed):
    return np.clip(np.round(KINDS[kind](count, seed)), 1, LONGEST).astype(int).tolist()


def documents_of(lengths):
    tokens = np.zeros(LONGEST, dtype=np.int64)
    return [Document(tokens[:length]) for length in lengths]


def histogram_of(counts):
    return LengthHistogram(
        tuple(sorted(counts)), tuple(counts[length] for length in sorted(counts))
    )


@pytest.mark.parametrize("cost", [CostModel(), FLASH4], ids=["varlen", "flash4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_unseen_documents_has_little_padding(kind, cost):
    plan = choose_buckets(LengthHistogram.of(lengths_of(kind, 20_000, 1)), BucketRequest(cost=cost))
    assert len(plan.capacities) <= 8 and plan.sample.above_bound(plan.request.cost) < 0.01
    report = PackReport()
    for _ in pack_stream(
        iter(documents_of(lengths_of(kind, 3000, 2))), plan.capacities, window=256, report=report
    ):
        pass
    assert report.documents == 3000
    assert report.padding_fraction < GOAL, (
        "two thirds of it in the rows that the end of the stream leaves"
    )
    assert (
        measure(plan.capacities, lengths_of(kind, 20_000, 3), STREAM).padding
        < GOAL / 10
        > plan.sample.padding
    )


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        pytest.param(kind, batch, marks=[pytest.mark.slow] * ((kind, batch) != ("code", 16)))
        for kind in KINDS
        for batch in (16, 64)
    ],
)
def test_batches_of_unseen_documents_have_little_padding(kind, batch):
    """All documents of a step are packed, none waits for the next: as with rollouts, or an
    evaluation."""
    policy = PackingPolicy(documents=batch, batches=True)
    plan = choose_buckets(
        LengthHistogram.of(lengths_of(kind, 20_000, 1)), BucketRequest(policy=policy)
    )
    assert len(plan.capacities) <= 8
    report, only_largest = PackReport(), PackReport()
    documents = documents_of(lengths_of(kind, 250 * 16, 2))
    for start in range(0, len(documents), batch):
        pack(documents[start : start + batch], plan.capacities, report=report)
        pack(documents[start : start + batch], plan.capacities[-1], report=only_largest)
    assert report.documents == len(documents)
    assert report.padding_fraction < GOAL < only_largest.padding_fraction
    assert abs(plan.sample.padding - report.padding_fraction) < 0.005


@settings(deadline=None, max_examples=5)
@given(COUNTS, strategies.booleans(), strategies.integers(1, 4), strategies.sampled_from([1, 16]))
def test_every_plan_holds_all_documents_and_is_the_same_twice(counts, batches, most, multiple):
    policy = PackingPolicy(documents=8, batches=batches, overlong="split")
    request = BucketRequest(policy=policy, max_tokens=256, max_buckets=most, multiple=multiple)
    plan = choose_buckets(histogram_of(counts), request)
    assert plan == choose_buckets(histogram_of(counts), request)
    assert 1 <= len(plan.capacities) <= most and list(plan.capacities) == sorted(
        set(plan.capacities)
    )
    assert plan.capacities[-1].tokens == 256 and all(
        found.tokens % multiple == 0 for found in plan.capacities
    )
    assert all(found.documents <= 256 for found in plan.capacities)
    packed = measure(
        plan.capacities, [length for length in counts for _ in range(counts[length])], policy
    )
    assert packed.tokens > 0 or not batches
    assert plan.sample.above_bound(plan.request.cost) >= -1e-9 and 0 <= plan.sample.padding < 1


@settings(deadline=None, max_examples=5)
@given(COUNTS, strategies.booleans())
def test_the_choice_is_the_cheapest_proposal_within_what_a_bucket_is_worth(counts, batches):
    request = BucketRequest(
        policy=PackingPolicy(documents=8, batches=batches), max_tokens=320, max_buckets=3, worth=0
    )
    histogram = histogram_of(counts)
    plan = choose_buckets(histogram, request)
    judge = Judge(histogram.draw(request.policy.sample_size(320, histogram.mean), 0), request)
    propose = batch_proposals if batches else stream_proposals
    best = min(judge.cost(corners) for corners in propose(judge, 320, 3))
    assert judge.cost([(found.tokens, found.documents) for found in plan.capacities]) <= best * (
        1 + 1e-12
    )


def test_a_stream_needs_only_its_largest_bucket_to_know_its_rows():
    """What `Judge` relies on: smaller buckets do not change which documents share a row."""
    lengths = lengths_of("lognormal", 2000, 3)
    buckets = [Capacity(2048, 8), Capacity(8192, 4), Capacity(8192, 40)]
    alone = pack_sample(lengths, buckets[-1:], STREAM)
    assert pack_sample(lengths, buckets, STREAM).all_fills == alone.all_fills and alone.rows > 100


def test_a_budget_drops_buckets_and_says_so():
    memory = LinearMemory(fixed=1000, per_token=10, per_document=0)
    request = BucketRequest(
        pool_bytes=memory, graph_bytes=500, max_tokens=1024, slots=2, budget=None
    )
    assert within_budget(request)[2] == ()
    tokens, buckets, (note,) = within_budget(
        replace(request, budget=2 * (1000 + 10 * 1024 + 3 * 500))
    )
    assert (tokens, buckets) == (1024, 3) and "3 instead of 8 buckets" in note
    tokens, buckets, (note,) = within_budget(
        replace(request, budget=2 * (1000 + 10 * 512 + 8 * 500))
    )
    assert (tokens, buckets) == (512, 8)
    assert "more than 512 tokens are dropped" in note and "for each of 2 slots" in note
    least = within_budget(replace(request, budget=2 * (1000 + 10 * 64 + 3 * 500 + 300)))
    assert least[:2] == (64, 3), "with fewer graphs where no size has room for all"
    with pytest.raises(ValueError, match="holds no bucket: one of 64 tokens needs"):
        within_budget(replace(request, budget=1000))
    policy = PackingPolicy(overlong="split")
    budget = 2 * (1000 + 10 * 512 + 8 * 500)
    plan = choose_buckets(
        LengthHistogram.of([600, 100, 30] * 50), replace(request, policy=policy, budget=budget)
    )
    assert plan.capacities[-1].tokens == 512 and plan.memory_bytes <= budget
    assert (
        "50 of 150 documents have more than 512 tokens, the longest 600; they are split"
        in plan.notes[-1]
    )


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="no document"):
        choose_buckets(LengthHistogram.of([]), BucketRequest())
    with pytest.raises(
        ValueError, match="1 of 2 documents have more than 8192 tokens, the longest 9000"
    ):
        choose_buckets(LengthHistogram.of([9000, 5]), BucketRequest())
    with pytest.raises(ValueError, match="all documents have more than 64 tokens and are dropped"):
        choose_buckets(
            LengthHistogram.of([90]),
            BucketRequest(max_tokens=64, policy=PackingPolicy(overlong="drop")),
        )
    with pytest.raises(
        ValueError, match=r"max_tokens must be at least 1, got 0; slots .* got -1; worth must not"
    ):
        BucketRequest(max_tokens=0, slots=-1, worth=-0.1)
    with pytest.raises(ValueError, match="documents must be at least 1"):
        PackingPolicy(documents=0)
    with pytest.raises(ValueError, match="tile_us must be positive"):
        CostModel(tile_us=-1.0)


@given(strategies.lists(strategies.integers(0, 500)), strategies.integers(1, 300))
def test_histograms(lengths, limit):
    histogram = LengthHistogram.of(iter(lengths))
    kept = sorted(length for length in lengths if length)
    assert (histogram.documents, histogram.tokens) == (len(kept), sum(kept))
    assert histogram.longest == max(kept, default=0) and histogram.longer_than(limit) == sum(
        n > limit for n in kept
    )
    assert histogram.quantile(0.5) == (kept[(len(kept) - 1) // 2] if kept else 0)
    pieces = [min(limit, length - start) for length in kept for start in range(0, length, limit)]
    assert histogram.within(limit, "split") == LengthHistogram.of(pieces)
    assert histogram.within(limit, "drop") == LengthHistogram.of(
        length for length in kept if length <= limit
    )
    if histogram.longest > limit:
        with pytest.raises(ValueError, match=f"have more than {limit} tokens"):
            histogram.within(limit, "error")
    if kept:
        assert set(histogram.draw(20, 0)) <= set(kept) and histogram.draw(20, 0) == histogram.draw(
            20, 0
        )


def test_bad_histograms_are_refused():
    for lengths, counts in (((2, 1), (1, 1)), ((1,), (1, 1)), ((0,), (1,)), ((1,), (0,))):
        with pytest.raises(ValueError, match="lengths must ascend from 1"):
            LengthHistogram(lengths, counts)
    with pytest.raises(ValueError, match="no documents to draw from"):
        LengthHistogram((), ()).draw(1, 0)


@given(
    strategies.lists(strategies.integers(1, 60), min_size=1, max_size=5),
    strategies.sets(strategies.integers(1, 15), max_size=3),
)
def test_places_of_a_cover_are_those_of_trying_all(batches, others):
    largest = 16
    sizes = sorted({*others, largest})

    def places(tokens):
        rows = -(-tokens // largest)
        free, sums = min(rows, 3), {0}
        for _ in range(free):
            sums = {one + size for one in sums for size in sizes}
        return (rows - free) * largest + min(
            total for total in sums if total >= tokens - (rows - free) * largest
        )

    assert covering_places(np.array(batches), sizes) == sum(map(places, batches))
    found = covering_sizes(batches, largest, len(sizes), 1)
    assert found[-1] == largest and len(found) == len(sizes) and sorted(set(found)) == list(found)
