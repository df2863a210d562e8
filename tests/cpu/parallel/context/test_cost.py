"""What rows cost: every kind of row pays for what it does, and timings tell coefficients."""

from dataclasses import replace

import pytest

from packgraph.packing.buckets.cost import FLASH4
from packgraph.parallel.context.plan import plan_context
from packgraph.parallel.context.request import (
    COEFFICIENTS,
    ContextCost,
    ContextRequest,
    RowTiming,
    fit,
)

FLASH = ContextCost.of(FLASH4)
PLAIN = ContextCost(
    microbatch_us=10.0,
    token_us=1.0,
    attention_us=0.1,
    group_us=10.0,
    exchange_us=0.5,
    document_us=1.0,
)


@pytest.mark.parametrize("zigzag", [(), (4,), (2, 4)])
def test_costs_are_found_again_from_timings(zigzag):
    found = ContextCost(
        microbatch_us=3000.0,
        token_us=7.0,
        attention_us=2e-3,
        group_us=900.0,
        exchange_us=1.5,
        document_us=20.0,
        gather_us=0.4,
        zigzag=zigzag,
    )
    rows = [
        (size, tokens, places, pairs)
        for size in (1, 2, 4)
        for tokens in (512, 2048)
        for places in (16, 64)
        for pairs in (1e5, 4e6)
    ]
    timings = [RowTiming(*row, found.row_us(*row)) for row in rows]
    fitted = fit(timings, replace(FLASH, zigzag=zigzag), weight=1e-9)
    unseen = {"gather_us"} if not zigzag else {"exchange_us"} if len(zigzag) == 2 else set()
    for name in COEFFICIENTS:
        expected = getattr(FLASH if name in unseen else found, name)
        assert getattr(fitted, name) == pytest.approx(expected, rel=1e-3), name
    assert fitted.zigzag == zigzag
    alone = fit([timing for timing in timings if timing.size == 1 and timing.tokens == 2048], FLASH)
    assert alone.row_us(1, 2048, 64, 4e6) == pytest.approx(found.row_us(1, 2048, 64, 4e6), rel=0.01)
    assert alone.exchange_us == pytest.approx(FLASH.exchange_us), (
        "what was not measured stays as it was"
    )
    cheaper = fit(
        [RowTiming(1, 1024, 16, 1e5, 1000.0), RowTiming(1, 2048, 16, 1e5, 3000.0)],
        FLASH,
        weight=1e-6,
    )
    assert min(getattr(cheaper, name) for name in COEFFICIENTS) >= 0, "no time is negative"
    assert cheaper.microbatch_us == 0


def test_a_row_in_zigzag_pays_for_all_keys_and_for_two_places_on_every_rank():
    """In columns: what ranks send and get, and what stands in their rows, is what
    ops/attention/zigzag.py says."""
    cost = ContextCost(
        microbatch_us=1.0,
        token_us=1.0,
        attention_us=0.01,
        group_us=8.0,
        exchange_us=100.0,
        document_us=5.0,
        tile_us=3.0,
        gather_us=10.0,
        zigzag=(4,),
    )
    assert (
        cost.row_us(1, 64, 0, 0.0) == 1 + 64 and cost.row_us(2, 64, 0, 0.0) == 1 + 64 + 8 + 100 * 32
    )
    assert cost.row_us(4, 64, 0, 0.0) == 1 + 64 + 4 + 10 * 3 * 64, (
        "keys and values of 3 other ranks' 64 tokens"
    )
    tiles = 3.0 * 64 / 128
    assert [cost.place_us(size, 64) for size in (1, 2, 4)] == [
        5.0 + tiles,
        2.5 + tiles,
        10.0 + tiles,
    ]
    assert [cost.pair_us(size) for size in (1, 2, 4)] == pytest.approx([0.01, 0.005, 0.0025]), (
        "attention is shared"
    )
    assert cost.row_us(4, 64, 3, 1e4) == pytest.approx(
        cost.row_us(4, 64, 0, 0.0) + 3 * cost.place_us(4, 64) + 25.0
    )


def test_a_plan_knows_which_sizes_are_dear_because_of_zigzag():
    """8 documents that fit pairs: where pairs gather at a high price, the plan takes longer than by
    ulysses."""
    lengths, plans = [48] * 8, []
    for zigzag in ((), (2, 4)):
        cost = replace(PLAIN, gather_us=5.0, zigzag=zigzag)
        plans.append(plan_context(lengths, ContextRequest(world=4, tokens=32, cost=cost)))
    assert plans[0].step_us < plans[1].step_us
