"""What a bank is compared with: the bucket that takes most alone, which is known only where all of
them were built."""

from types import SimpleNamespace

import pytest
from bench_context import ContextComparison

from packgraph.packing.capacity import Capacity

BUCKETS = [Capacity(32, 4), Capacity(32, 8), Capacity(64, 4), Capacity(64, 8)]


def extras(alone):
    """Of a way whose pools take 90 and 100 bytes. alone: bytes of a bank by the tokens of its one
    bucket."""
    contest = SimpleNamespace(reasons={}, extras={"dynamic+graph": {"pool_bytes": [90, 100]}})
    bench = SimpleNamespace(
        late=lambda: False,
        buckets=lambda kind: BUCKETS,
        results=contest,
        pool_alone=lambda name, bucket: alone[bucket.tokens] if bucket.documents == 8 else 1 / 0,
    )
    ContextComparison.finish(bench)
    return contest.extras["dynamic+graph"]


def test_the_bucket_that_takes_most_is_the_fullest_of_some_size():
    assert extras({32: 80, 64: 50}) == {
        "pool_bytes": [90, 100],
        "largest_pool_bytes": 80,
        "pool_ratio": 1.25,
    }


@pytest.mark.parametrize("alone", [{32: 0, 64: 50}, {32: 80, 64: 0}, {32: 0, 64: 0}])
def test_there_is_no_ratio_where_a_bucket_failed(alone):
    assert extras(alone) == {"pool_bytes": [90, 100]}
