"""Rows with transfers end under the hardest waiting there is, keep within their slots and get no
slower."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packgraph.parallel.pipeline.schedule import (
    Action,
    Op,
    Schedule,
    make_rows,
    make_schedule,
    needed,
    receiver_of,
    simulate,
    slot_counts,
)


def blocking_run(schedule, rows):
    """Where each rank stops if every transfer blocks both its ends until the other one is there;
    None at the end."""
    place = [0] * len(rows)
    done = set()
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                op = row[place[rank]]
                if op.what == "RUN":
                    own = [
                        s
                        for s in needed(schedule, op.action)
                        if receiver_of(schedule, s) is None or s.kind == "F"
                    ]
                    assert all(s in done for s in own if schedule.rank_of(s.stage) == rank)
                    done.add(op.action)
                else:
                    other = partner(schedule, op)
                    there = schedule.rank_of(other.action.stage)
                    if place[there] == len(rows[there]) or rows[there][place[there]] != other:
                        break
                    place[there] += 1
                place[rank] += 1
                moving = True
    return [row[at] if at < len(row) else None for at, row in zip(place, rows, strict=True)]


def partner(schedule, op):
    """The other end of a transfer."""
    step = 1 if op.action.kind == "F" else -1
    if op.what == "SEND":
        return Op("RECV", receiver_of(schedule, op.action))
    return Op("SEND", Action(op.action.kind, op.action.stage - step, op.action.microbatch))


def makespan(schedule, rows):
    """Time of the rows when runs take 1 and 2, and transfers wait for data, nothing else."""
    done, clock, place = {}, [0] * len(rows), [0] * len(rows)
    while any(at < len(row) for at, row in zip(place, rows, strict=True)):
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                op = row[place[rank]]
                if op.what == "RUN":
                    if any(source not in done for source in needed(schedule, op.action)):
                        break
                    start = max(
                        [clock[rank], *(done[source] for source in needed(schedule, op.action))]
                    )
                    clock[rank] = done[op.action] = start + (1 if op.action.kind == "F" else 2)
                place[rank] += 1
    return max(clock)


def check(schedule, slots):
    rows = make_rows(schedule, slots)
    runs = tuple(tuple(op.action for op in row if op.what == "RUN") for row in rows)
    assert runs == schedule.rows
    assert blocking_run(schedule, rows) == [None] * schedule.ranks
    assert makespan(schedule, rows) == simulate(schedule, 1, 2).makespan
    for rank, row in enumerate(rows):
        held = [set() for _ in range(schedule.chunks)]
        for op in row:
            owners, key = held[schedule.chunk_of(op.action.stage)], op.action.microbatch
            if (op.what, op.action.kind) in (("RECV", "F"), ("RUN", "F")):
                owners.add(key)
            elif (op.what, op.action.kind) == ("RUN", "B"):
                owners.remove(key)
            assert len(owners) <= slots[rank][schedule.chunk_of(op.action.stage)]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", range(1, 5))
def test_every_schedule_runs_under_blocking_transfers_within_its_slots(ranks, chunks):
    for microbatches in range(1, 2 * ranks + 3):
        check(make_schedule(ranks, chunks, microbatches), slot_counts(ranks, chunks))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(0, 6), st.integers(1, 24))
def test_other_group_sizes_too(ranks, chunks, more, microbatches):
    group = ranks + more
    check(make_schedule(ranks, chunks, microbatches, group), slot_counts(ranks, chunks, group))


def test_the_rows_of_two_ranks():
    rows = make_rows(make_schedule(2, 1, 2), slot_counts(2, 1))
    assert [" ".join(map(str, row)) for row in rows] == [
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_receives_started_as_early_as_possible_would_stop_two_ranks():
    """Negative control: the check above fails for rows that receive one action ahead."""
    schedule = make_schedule(2, 1, 3)
    rows = [list(row) for row in make_rows(schedule, slot_counts(2, 1))]
    for row in rows:
        for at, op in enumerate(row):
            if op.what == "RECV":
                runs = [i for i in range(at) if row[i].what == "RUN"]
                row.insert(runs[-1] if runs else 0, row.pop(at))
    assert any(blocking_run(schedule, rows))


def test_too_few_slots_are_named():
    with pytest.raises(
        ValueError, match="cannot run with these slots: rank 0 stays at 0F1, rank 1 stays at 1F0"
    ):
        make_rows(make_schedule(2, 1, 3), ((1,), (0,)))
    with pytest.raises(ValueError, match="rank 0 stays at 0B0"):
        make_rows(Schedule(1, 1, 1, ((Action("B", 0, 0), Action("F", 0, 0)),)), ((1,),))
