"""Choosing between replay and eager, and the turns in which they are timed: pure functions."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.plan.choice import EAGER, FEWEST_SAMPLES, MARGIN, REPLAY, SAMPLES, WAYS, Choice, Timing, Vote, choose
from packgraph.plan.timing_turns import Turns

MILLISECONDS = st.floats(0.01, 1000.0)
SOME = st.lists(MILLISECONDS, min_size=FEWEST_SAMPLES, max_size=12)
FEW = st.lists(MILLISECONDS, max_size=FEWEST_SAMPLES - 1)
VOTES = st.lists(st.builds(lambda eager, replay: Vote(Timing.of(eager), Timing.of(replay)), SOME, SOME), min_size=1,
                 max_size=6)


def steady(eager: float, replay: float, samples: int = SAMPLES) -> Vote:
    return Vote(Timing.of([eager] * samples), Timing.of([replay] * samples))


@pytest.mark.parametrize(("eager", "replay", "way"), [
    (10.0, 5.0, REPLAY), (10.0, 10.0, REPLAY), (10.0, 10.0 * (1 + MARGIN) - 0.001, REPLAY),
    (10.0, 10.0 * (1 + MARGIN) + 0.001, EAGER), (10.0, 20.0, EAGER)])
def test_replay_stays_unless_it_is_slower_by_more_than_the_margin(eager, replay, way):
    assert choose([steady(eager, replay)]).way == way


@given(VOTES)
def test_eager_is_chosen_only_where_replay_is_slower_by_more_than_margin_and_noise(votes):
    choice = choose(votes)
    slowest = {way: max((getattr(vote, way) for vote in votes), key=lambda timing: timing.median) for way in WAYS}
    assert (choice.eager, choice.replay) == (slowest[EAGER], slowest[REPLAY])
    lost = choice.replay.median - choice.eager.median
    if choice.way == EAGER:
        assert lost > MARGIN * choice.eager.median and choice.gain > 1 + MARGIN / 2
        assert lost > choice.eager.spread and lost > choice.replay.spread
    else:
        assert lost <= max(MARGIN * choice.eager.median, choice.eager.spread, choice.replay.spread)


@given(VOTES, st.randoms())
def test_all_ranks_choose_alike_in_whatever_order_they_are_asked(votes, draw):
    shuffled = list(votes)
    draw.shuffle(shuffled)
    first, second = choose(votes), choose(shuffled)
    assert (first.eager.median, first.replay.median) == (second.eager.median, second.replay.median)


@given(SOME, SOME, st.floats(0.001, 1000.0))
def test_units_do_not_matter_where_the_times_are_clear(eager, replay, factor):
    before = choose([Vote(Timing.of(eager), Timing.of(replay))])
    after = choose([Vote(Timing.of([time * factor for time in eager]), Timing.of([time * factor for time in replay]))])
    lost = before.replay.median - before.eager.median
    limit = max(MARGIN * before.eager.median, before.eager.spread, before.replay.spread)
    if abs(lost - limit) > 1e-6 * limit:
        assert before.way == after.way


@given(VOTES, FEW, SOME)
def test_ranks_with_few_samples_have_no_vote(votes, few, some):
    without = choose(votes)
    assert choose([*votes, Vote(Timing.of(few), Timing.of(some)), Vote(Timing.of(some), Timing.of(few))]) == without
    assert choose([Vote(Timing.of(few), Timing.of(some))]) is None and choose([]) is None


def test_the_slowest_rank_decides():
    """Replay is faster on two ranks, but all wait for the third."""
    assert choose([steady(10, 5), steady(10, 6), steady(11, 13)]).way == EAGER
    assert choose([steady(10, 5), steady(14, 6), steady(11, 13)]).way == REPLAY


def test_two_disturbed_samples_of_five_change_nothing():
    vote = Vote(Timing.of([10.0] * 5), Timing.of([9.0, 500.0, 9.0, 300.0, 9.0]))
    assert choose([vote]) == Choice(REPLAY, Timing(10.0, 0.0, 5), Timing(9.0, 0.0, 5))


def test_a_timing_without_samples_is_no_number():
    assert math.isnan(Timing.of([]).median) and Timing.of([]).samples == 0


BUCKETS = ("small", "middle", "large")
SHARES = st.integers(1, 3).flatmap(lambda replicas: st.lists(
    st.lists(st.lists(st.sampled_from([*BUCKETS, "not captured"]), max_size=3), min_size=replicas, max_size=replicas),
    max_size=60))


@given(SHARES)
def test_turns_end_when_everything_is_timed_both_ways(steps):
    """Naive twin: what the turns say they have timed is counted by hand; a step is timed only if it helps."""
    turns, timed = Turns(), {}
    settled: list[str] = []
    for shares in steps:
        still_open = [bucket for bucket in BUCKETS if bucket not in settled]
        ripe = turns.ripe(still_open)
        most = {(bucket, way): max(timed.get((replica, bucket, way), 0) for replica in range(len(shares)))
                for bucket in still_open for way in WAYS}
        assert ripe == [bucket for bucket in still_open if min(most[bucket, way] for way in WAYS) >= SAMPLES]
        settled += ripe
        still_open = [bucket for bucket in still_open if bucket not in ripe]
        way = turns.next_way(shares, still_open)
        present = {bucket for share in shares for bucket in share} & set(still_open)
        if way is None:
            assert not present, "a bucket that is not ripe yet is timed wherever it appears"
            continue
        assert any(most[bucket, way] < SAMPLES for bucket in present), "a turn times something that is missing"
        turns = turns.after(shares, way)
        for replica, share in enumerate(shares):
            for bucket in share:
                timed[replica, bucket, way] = timed.get((replica, bucket, way), 0) + 1
    eager_steps = [key for key in timed if key[2] == EAGER]
    assert len(eager_steps) <= 3 * (len(BUCKETS) + 1)


def test_turns_alternate_from_replay_on():
    turns, ways = Turns(), []
    while (way := turns.next_way([["small"]], ["small"] if not turns.ripe(["small"]) else [])) is not None:
        ways.append(way)
        turns = turns.after([["small"]], way)
    assert ways == [REPLAY, EAGER] * SAMPLES


def test_a_bucket_can_be_timed_again():
    turns = Turns()
    for way in WAYS * SAMPLES:
        turns = turns.after([["small", "large"]], way)
    assert turns.ripe(BUCKETS) == ["small", "large"]
    assert turns.without("small").ripe(BUCKETS) == ["large"]
