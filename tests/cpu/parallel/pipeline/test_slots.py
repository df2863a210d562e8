"""Slots: exact for every microbatch count, by enumeration; assigned from a free list that never
runs out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.parallel.pipeline.schedule import (
    Action,
    Schedule,
    assign_slots,
    make_schedule,
    peak_in_flight,
    simulate,
    slot_counts,
)

Counts = tuple[tuple[int, ...], ...]


def check_every_count(ranks: int, chunks: int, group: int, most: int) -> None:
    """Complete, free of deadlock and within the slots for 1 to `most` microbatches, and no slot too
    many."""
    counts = slot_counts(ranks, chunks, group)
    highest = [[0] * chunks for _ in range(ranks)]
    for microbatches in range(1, most + 1):
        schedule = make_schedule(ranks, chunks, microbatches, group)
        simulate(schedule)
        for rank, row in enumerate(peak_in_flight(schedule)):
            highest[rank] = [max(pair) for pair in zip(highest[rank], row)]
    assert tuple(map(tuple, highest)) == counts


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_every_microbatch_count_runs_in_exactly_these_slots(ranks: int, chunks: int) -> None:
    check_every_count(ranks, chunks, ranks, 2 * ranks + 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_every_group_size_and_longer_steps_run_in_exactly_these_slots(
    ranks: int, chunks: int
) -> None:
    for group in sorted({ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks}):
        check_every_count(
            ranks, chunks, group, (4 if ranks < 5 else 3) * group + 1
        )  # the time grows with its square


def test_known_counts() -> None:
    for ranks in range(1, 9):
        assert slot_counts(ranks, 1) == tuple((ranks - rank,) for rank in range(ranks))
    four = slot_counts(4, 2)
    assert four[0] == (8, 4) and four[3] == (5, 1)
    eight = slot_counts(8, 4)
    assert eight[0] == (16, 16, 8, 8) and eight[7] == (16, 9, 8, 1)
    # A last group of two that takes turns of its own would need (4, 2) on rank 1.
    assert slot_counts(2, 2, 3) == ((6, 3), (4, 1))
    with pytest.raises(ValueError, match="ranks must be"):
        slot_counts(0, 1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 5), st.integers(1, 30))
def test_slots_are_owned_by_one_microbatch_at_a_time(
    ranks: int, chunks: int, more: int, microbatches: int
) -> None:
    schedule = make_schedule(ranks, chunks, microbatches, ranks + more)
    slots, counts = assign_slots(schedule), slot_counts(ranks, chunks, ranks + more)
    assert len(slots) == schedule.stages * microbatches
    for rank, row in enumerate(schedule.rows):
        owners: dict[tuple[int, int], int] = {}
        for action in row:
            slot = slots[(rank, action.stage, action.microbatch)]
            assert 0 <= slot < counts[rank][schedule.chunk_of(action.stage)]
            if action.kind == "F":
                assert (action.stage, slot) not in owners
                owners[(action.stage, slot)] = action.microbatch
            else:
                assert owners.pop((action.stage, slot)) == action.microbatch
        assert not owners


def test_the_lowest_free_slot_is_taken() -> None:
    slots = assign_slots(make_schedule(2, 1, 4))
    assert [slots[(0, 0, microbatch)] for microbatch in range(4)] == [0, 1, 0, 1]
    assert [slots[(1, 1, microbatch)] for microbatch in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([("B", 0)], "0B0 on rank 0 has no forward before it"),
        ([("F", 0), ("F", 0)], "0F0 on rank 0 runs while its microbatch is in flight"),
        ([("F", 0), ("B", 0), ("B", 0)], "0B0 on rank 0 has no forward before it"),
    ],
)
def test_a_slot_taken_twice_or_given_back_unowned_is_an_error(row: list, said: str) -> None:
    actions = tuple(Action(kind, 0, microbatch) for kind, microbatch in row)
    with pytest.raises(ValueError, match=said):
        assign_slots(Schedule(1, 1, 1, (actions,)))
