"""Choosing between replay and eager, and the turns in which they are timed: pure functions."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.train.choice import (
    EAGER,
    FEWEST_SAMPLES,
    MARGIN,
    MOST_SAMPLES,
    REPLAY,
    SAMPLES,
    WAYS,
    Choice,
    Timing,
    Turns,
    Vote,
    choose,
)

MILLISECONDS = st.floats(0.01, 1000.0)
SOME = st.lists(MILLISECONDS, min_size=FEWEST_SAMPLES, max_size=12)
FEW = st.lists(MILLISECONDS, max_size=FEWEST_SAMPLES - 1)
VOTES = st.lists(
    st.builds(lambda eager, replay: Vote(Timing.of(eager), Timing.of(replay)), SOME, SOME),
    min_size=1,
    max_size=6,
)


def steady(eager: float, replay: float, samples: int = SAMPLES) -> Vote:
    return Vote(Timing.of([eager] * samples), Timing.of([replay] * samples))


@pytest.mark.parametrize(
    ("eager", "replay", "way"),
    [
        (10.0, 5.0, REPLAY),
        (10.0, 10.0, REPLAY),
        (10.0, 10.0 * (1 + MARGIN) - 0.001, REPLAY),
        (10.0, 10.0 * (1 + MARGIN) + 0.001, EAGER),
        (10.0, 20.0, EAGER),
    ],
)
def test_replay_stays_unless_it_is_slower_by_more_than_the_margin(eager, replay, way):
    assert choose([steady(eager, replay)]).way == way


@given(VOTES)
def test_eager_is_chosen_only_where_replay_is_slower_by_more_than_margin_and_noise(votes):
    choice = choose(votes)
    before_more = choose(votes, last=False)
    slowest = {
        way: max((getattr(vote, way) for vote in votes), key=lambda timing: timing.median)
        for way in WAYS
    }
    assert (choice.eager, choice.replay) == (slowest[EAGER], slowest[REPLAY])
    lost = choice.replay.median - choice.eager.median
    noise = math.hypot(choice.eager.error, choice.replay.error)
    assert (choice.way == EAGER) == (lost > MARGIN * choice.eager.median and lost > noise)
    assert before_more == (None if MARGIN * choice.eager.median < lost <= noise else choice)
    assert choice.way == REPLAY or choice.gain > 1 + MARGIN / 2


@given(VOTES, st.randoms())
def test_all_ranks_choose_alike_in_whatever_order_they_are_asked(votes, draw):
    shuffled = list(votes)
    draw.shuffle(shuffled)
    first, second = choose(votes), choose(shuffled)
    assert (first.eager.median, first.replay.median) == (second.eager.median, second.replay.median)


@given(SOME, SOME, st.floats(0.001, 1000.0))
def test_units_do_not_matter_where_the_times_are_clear(eager, replay, factor):
    before = choose([Vote(Timing.of(eager), Timing.of(replay))])
    after = choose(
        [
            Vote(
                Timing.of([time * factor for time in eager]),
                Timing.of([time * factor for time in replay]),
            )
        ]
    )
    lost = before.replay.median - before.eager.median
    limit = max(MARGIN * before.eager.median, math.hypot(before.eager.error, before.replay.error))
    if abs(lost - limit) > 1e-6 * (limit + before.eager.median):
        assert before.way == after.way


@given(VOTES, FEW, SOME)
def test_ranks_with_few_samples_have_no_vote(votes, few, some):
    without = choose(votes)
    assert (
        choose(
            [*votes, Vote(Timing.of(few), Timing.of(some)), Vote(Timing.of(some), Timing.of(few))]
        )
        == without
    )
    assert choose([Vote(Timing.of(few), Timing.of(some))]) is None and choose([]) is None


def test_the_slowest_rank_decides():
    """Replay is faster on two ranks, but all wait for the third."""
    assert choose([steady(10, 5), steady(10, 6), steady(11, 13)]).way == EAGER
    assert choose([steady(10, 5), steady(14, 6), steady(11, 13)]).way == REPLAY


def test_two_disturbed_samples_of_five_change_nothing():
    vote = Vote(Timing.of([10.0] * 5), Timing.of([9.0, 500.0, 9.0, 300.0, 9.0]))
    assert choose([vote]) == Choice(REPLAY, Timing(10.0, 0.0, 5), Timing(9.0, 0.0, 5))


def test_the_error_of_a_median_is_that_of_drawn_ones():
    draw = random.Random(0)
    medians = [Timing.of([draw.gauss(10.0, 1.0) for _ in range(25)]) for _ in range(2000)]
    found = statistics.pstdev(timing.median for timing in medians)
    estimated = statistics.mean(timing.error for timing in medians)
    assert 0.9 < estimated / found < 1.1


def test_a_timing_without_samples_is_no_number():
    assert math.isnan(Timing.of([]).median) and Timing.of([]).samples == 0


BUCKETS = ("small", "middle", "large")
SHARES = st.integers(1, 3).flatmap(
    lambda replicas: st.tuples(
        st.just(replicas),
        st.lists(
            st.lists(
                st.lists(st.sampled_from([*BUCKETS, "not captured"]), max_size=3),
                min_size=replicas,
                max_size=replicas,
            ),
            max_size=60,
        ),
    )
)


def enough(counts: list[int]) -> bool:
    """Naive twin: whether replicas with so many timings of a bucket may choose."""
    return max(counts) >= MOST_SAMPLES or (max(counts) >= SAMPLES and min(counts) >= FEWEST_SAMPLES)


@given(SHARES)
def test_turns_end_when_everything_is_timed_both_ways(replicas_and_steps):
    """What the turns have timed is counted by hand; a step is timed only if it helps, and not for
    ever."""
    replicas, steps = replicas_and_steps
    turns = Turns(replicas)
    timed = {(bucket, way): [0] * replicas for bucket in BUCKETS for way in WAYS}
    still_open, eager_steps = list(BUCKETS), 0
    for shares in steps:
        ripe = turns.ripe(still_open)
        assert ripe == [
            bucket for bucket in still_open if all(enough(timed[bucket, way]) for way in WAYS)
        ]
        still_open = [bucket for bucket in still_open if bucket not in ripe]
        way = turns.next_way(shares, still_open)
        present = {bucket for share in shares for bucket in share} & set(still_open)
        if way is None:
            assert not present, "a bucket that is not ripe yet is timed wherever it appears"
            continue
        assert not all(enough(timed[bucket, way]) for bucket in present), (
            "a turn times something that is missing"
        )
        eager_steps += way == EAGER
        turns = turns.after(shares, way)
        for replica, share in enumerate(shares):
            for bucket in set(share) & set(BUCKETS):
                timed[bucket, way][replica] += share.count(bucket)
    assert eager_steps <= replicas * MOST_SAMPLES * len(BUCKETS)


def test_a_replica_to_which_a_bucket_never_comes_is_not_waited_for_long():
    turns, steps = Turns(2), 0
    while not turns.ripe(["small"]):
        turns, steps = (
            turns.after([["small"], []], turns.next_way([["small"], []], ["small"])),
            steps + 1,
        )
    assert steps == 2 * MOST_SAMPLES


def test_turns_alternate_from_replay_on():
    turns, ways = Turns(1), []
    while (
        way := turns.next_way([["small"]], ["small"] if not turns.ripe(["small"]) else [])
    ) is not None:
        ways.append(way)
        turns = turns.after([["small"]], way)
    assert ways == [REPLAY, EAGER] * SAMPLES


def test_a_bucket_can_be_timed_again():
    turns = Turns(1)
    for way in WAYS * SAMPLES:
        turns = turns.after([["small", "large"]], way)
    assert turns.ripe(BUCKETS) == ["small", "large"]
    assert turns.without("small").ripe(BUCKETS) == ["large"]
