"""Simulation: known times and bubbles, costs of transfer and microbatches, and what is said when
nothing can run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.parallel.pipeline.schedule import (
    Action,
    Schedule,
    make_schedule,
    needed,
    simulate,
)


@given(st.integers(1, 6), st.integers(1, 20))
def test_1f1b_takes_the_time_of_the_formula(ranks: int, microbatches: int) -> None:
    timeline = simulate(make_schedule(ranks, 1, microbatches), 1, 2)
    assert timeline.makespan == 3 * (microbatches + ranks - 1)
    assert timeline.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_interleaving_divides_the_bubble_by_the_chunks(
    ranks: int, chunks: int, rounds: int
) -> None:
    timeline = simulate(make_schedule(ranks, chunks, rounds * ranks), 1, 2)
    assert timeline.makespan == 3 * (rounds * ranks * chunks + ranks - 1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.data())
def test_actions_start_when_their_inputs_are_there_and_the_rank_is_free(
    ranks: int, chunks: int, microbatches: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.integers(1, 9), min_size=microbatches, max_size=microbatches))
    transfer = data.draw(st.integers(0, 3))
    schedule = make_schedule(ranks, chunks, microbatches)
    timeline = simulate(schedule, 2, 3, transfer, costs)
    when = {
        action: (start, end)
        for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends)
        for action, start, end in zip(row, starts, ends)
    }
    for rank, row in enumerate(schedule.rows):
        for before, action in zip((None, *row), row):
            start, end = when[action]
            ready = [
                when[source][1] + (transfer if schedule.rank_of(source.stage) != rank else 0)
                for source in needed(schedule, action)
            ]
            assert start == max([0, *ready, *([when[before][1]] if before else [])])
            assert end - start == (2 if action.kind == "F" else 3) * costs[action.microbatch]


def test_a_deadlock_names_what_every_rank_waits_for() -> None:
    orders = [("F0", "B0", "F1", "B1"), ("F1", "B1", "F0", "B0")]
    rows = (tuple(Action(a[0], stage, int(a[1])) for a in row) for stage, row in enumerate(orders))
    schedule = Schedule(2, 1, 2, tuple(rows))
    with pytest.raises(ValueError) as caught:
        simulate(schedule)
    assert str(caught.value) == (
        "this schedule cannot run: the ranks wait for each other\n"
        "  - rank 0 is at 0B0, which waits for 1B0 of rank 1\n"
        "  - rank 1 is at 1F1, which waits for 0F1 of rank 0"
    )


def test_bad_costs_are_refused() -> None:
    with pytest.raises(
        ValueError, match="must be positive\n  - there are 1 costs for 2 microbatches"
    ):
        simulate(make_schedule(1, 1, 2), microbatch_costs=[0])
    with pytest.raises(ValueError, match="must be positive"):
        simulate(make_schedule(1, 1, 2), transfer_cost=-1)
