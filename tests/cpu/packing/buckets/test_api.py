"""Capacities by `packgraph.plan_buckets`: documents fit, padding is small, errors name numbers."""

import numpy as np
import pytest

import packgraph


def test_buckets_hold_the_documents_with_less_padding_than_one_capacity():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 3000).clip(1, 2048).astype(int)
    buckets = packgraph.plan_buckets(lengths, max_tokens=2048, max_buckets=4)
    assert 1 <= len(buckets) <= 4
    assert buckets == sorted(buckets)
    assert buckets == packgraph.plan_buckets(lengths, max_tokens=2048, max_buckets=4)
    report, single = packgraph.PackReport(), packgraph.PackReport()
    documents = [[1] * length for length in lengths[:600]]
    list(packgraph.pack_stream(documents, buckets, report=report))
    list(packgraph.pack_stream(documents, [packgraph.Capacity(2048, 8)], report=single))
    assert report.documents == 600
    assert report.padding_fraction < min(0.05, single.padding_fraction)


def test_lengths_and_numbers_out_of_range_are_named():
    with pytest.raises(ValueError, match="there is no document"):
        packgraph.plan_buckets([])
    with pytest.raises(ValueError, match="5000"):
        packgraph.plan_buckets([10, 5000], max_tokens=4096)
    with pytest.raises(ValueError, match="buckets"):
        packgraph.plan_buckets([10], max_buckets=0)
    assert packgraph.plan_buckets([10, 5000], max_tokens=4096, overlong="split")[-1].tokens <= 4096
