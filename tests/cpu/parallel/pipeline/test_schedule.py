"""Schedules: the rows of torch and of Megatron, every microbatch count, text that torch reads,
clear refusals."""

import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from packgraph.parallel.pipeline.schedule import (
    Action,
    Schedule,
    legal_microbatches,
    make_schedule,
    peak_in_flight,
    simulate,
    to_csv,
)


def needs_torch(*names: str) -> None:
    for name in names:
        owner: object = torch_schedules
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            pytest.skip(f"this torch has no private {name} to compare with")


def words(row: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in row]


def torch_words(row: list) -> list[str]:
    """Forwards and backwards only: newer versions add an action that reduces gradients."""
    return [
        str(action)
        for action in row
        if action is not None and action.computation_type.value in ("F", "B")
    ]


def chunk_signs(schedule: Schedule, rank: int) -> list[int]:
    """The notation of Megatron: +c for a forward of the c-th chunk (from 1), -c for a backward."""
    return [
        (1 + schedule.chunk_of(action.stage)) * (1 if action.kind == "F" else -1)
        for action in schedule.rows[rank]
    ]


def megatron_schedule(ranks: int, chunks: int, group: int, microbatches: int) -> Schedule:
    """Interleaving as Megatron does it: a short last group takes turns of its own, the warm-up is
    as in a full one."""
    turns = [
        (microbatch, chunk)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]
    rows = []
    for rank in range(ranks):
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * group, len(turns))
        forwards = [Action("F", chunk * ranks + rank, microbatch) for microbatch, chunk in turns]
        backwards = [
            Action("B", (chunks - 1 - chunk) * ranks + rank, microbatch)
            for microbatch, chunk in turns
        ]
        pairs = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
        rows.append((*forwards[:warmup], *pairs, *backwards[len(turns) - warmup :]))
    return Schedule(ranks, chunks, microbatches, tuple(rows))


def torch_1f1b(rank: int, ranks: int, microbatches: int) -> list[str]:
    """What torch's Schedule1F1B runs on a rank, recorded by a stage that computes and sends
    nothing."""
    ran: list[str] = []
    stage, plan = (
        MagicMock(stage_index=rank),
        MagicMock(_n_microbatches=microbatches, _num_stages=ranks),
    )
    stage.forward_one_chunk.side_effect = lambda microbatch, *_, **__: ran.append(
        f"{rank}F{microbatch}"
    )
    stage.backward_one_chunk.side_effect = lambda microbatch, *_, **__: ran.append(
        f"{rank}B{microbatch}"
    )
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).side_effect = lambda _: []
    plan._stage = stage
    plan._check_inputs.return_value = ([()] * microbatches, [{}] * microbatches)
    torch_schedules.Schedule1F1B._step_microbatches(plan)
    return ran


@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_chunk_per_rank_is_the_1f1b_of_torch(ranks: int) -> None:
    needs_torch("Schedule1F1B._step_microbatches")
    # torch refuses fewer microbatches than ranks when it makes the schedule, but runs them in the
    # same way.
    for microbatches in range(1, 3 * ranks + 2):
        for rank, row in enumerate(make_schedule(ranks, 1, microbatches).rows):
            assert words(row) == torch_1f1b(rank, ranks, microbatches)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_several_chunks_per_rank_are_the_interleaved_schedule_of_torch(
    ranks: int, chunks: int
) -> None:
    needs_torch("ScheduleInterleaved1F1B._calculate_single_rank_operations")
    for microbatches in range(1, 4 * ranks + 1):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            continue
        group = microbatches // rounds
        plan = SimpleNamespace(
            n_local_stages=chunks,
            microbatches_per_round=group,
            pp_group_size=ranks,
            _n_microbatches=microbatches,
        )
        schedule = make_schedule(ranks, chunks, microbatches, max(group, ranks))
        for rank, row in enumerate(schedule.rows):
            expected = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(
                plan, rank
            )
            assert words(row) == torch_words(expected)


@pytest.mark.parametrize(
    ("ranks", "chunks", "group"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 4), (1, 3, 1), (2, 2, 3), (4, 2, 4), (3, 4, 5)],
)
def test_torch_accepts_and_simulates_every_count(ranks: int, chunks: int, group: int) -> None:
    needs_torch(
        "_Action.from_str", "_validate_schedule", "_add_send_recv", "_simulate_comms_compute"
    )
    if len(inspect.signature(torch_schedules._validate_schedule).parameters) != 4:
        pytest.skip("this torch validates schedules with other arguments")
    for microbatches in range(1, 2 * group + 2):
        schedule = make_schedule(ranks, chunks, microbatches, group)
        rows = {
            rank: [torch_schedules._Action.from_str(word) for word in line.split(",")]
            for rank, line in enumerate(to_csv(schedule).splitlines())
        }
        stage_to_rank = torch_schedules._validate_schedule(
            rows, ranks, schedule.stages, microbatches
        )
        assert all(schedule.rank_of(stage) == rank for stage, rank in stage_to_rank.items())
        whole = torch_schedules._add_send_recv(rows, stage_to_rank.__getitem__, schedule.stages)
        torch_schedules._simulate_comms_compute(whole, stage_to_rank.__getitem__, schedule.stages)


def test_the_worked_examples_of_megatron() -> None:
    assert chunk_signs(make_schedule(2, 1, 4), 0) == [1, 1, -1, 1, -1, 1, -1, -1]
    tail = megatron_schedule(2, 2, 3, 5)
    assert chunk_signs(tail, 0) == [
        1,
        1,
        1,
        2,
        2,
        2,
        -2,
        1,
        -2,
        1,
        -2,
        2,
        -1,
        2,
        -1,
        -1,
        -2,
        -2,
        -1,
        -1,
    ]
    # Ours runs the same forwards and backwards; the chunk's turn is that of a group of three
    # without its third.
    assert chunk_signs(make_schedule(2, 2, 5, 3), 0) == [
        1,
        1,
        1,
        2,
        2,
        2,
        -2,
        1,
        -2,
        1,
        -2,
        -1,
        2,
        -1,
        2,
        -1,
        -2,
        -2,
        -1,
        -1,
    ]
    for ranks, chunks, group in ((2, 2, 2), (4, 2, 4), (4, 2, 6), (8, 4, 8), (3, 3, 4)):
        for rounds in (1, 2, 3):
            ours = make_schedule(ranks, chunks, rounds * group, group)
            assert ours == megatron_schedule(ranks, chunks, group, rounds * group)


@pytest.mark.parametrize(
    ("ranks", "chunks", "group", "deadlocks"),
    [
        (2, 2, 3, False),
        (4, 2, 4, False),
        (4, 3, 6, False),
        (4, 4, 4, True),
        (8, 2, 8, True),
        (6, 3, 6, True),
    ],
)
def test_a_short_last_group_ends_no_later_and_takes_no_more_slots_than_turns_of_its_own(
    ranks: int, chunks: int, group: int, deadlocks: bool
) -> None:
    reasons = []
    for microbatches in (count for count in range(group + 1, 3 * group) if count % group):
        ours = make_schedule(ranks, chunks, microbatches, group)
        theirs = megatron_schedule(ranks, chunks, group, microbatches)
        makespan = simulate(ours).makespan
        try:
            assert makespan <= simulate(theirs).makespan
        except ValueError as error:
            assert microbatches % group < ranks
            reasons.append(str(error))
        for mine, other in zip(peak_in_flight(ours), peak_in_flight(theirs)):
            assert all(map(int.__le__, mine, other))
    assert bool(reasons) == deadlocks and all("wait for each other" in reason for reason in reasons)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 40))
def test_every_count_is_legal_complete_and_in_order(
    ranks: int, chunks: int, more: int, microbatches: int
) -> None:
    schedule = make_schedule(ranks, chunks, microbatches, ranks + more)
    stages, numbers = range(schedule.stages), range(microbatches)
    every = [Action(kind, stage, number) for kind in "BF" for stage in stages for number in numbers]
    assert sorted(action for row in schedule.rows for action in row) == every
    for rank, row in enumerate(schedule.rows):
        assert all(schedule.rank_of(action.stage) == rank for action in row)
    for row in schedule.rows:
        for stage in {action.stage for action in row}:
            for kind in ("F", "B"):
                found = [
                    action.microbatch
                    for action in row
                    if (action.kind, action.stage) == (kind, stage)
                ]
                assert found == list(range(microbatches))
    # Fewer microbatches are the same schedule with the others struck out, so counts may change from
    # step to step.
    if microbatches > ranks + more or chunks == 1:
        longer = make_schedule(ranks, chunks, microbatches + 7, ranks + more)
        for row, long in zip(schedule.rows, longer.rows):
            assert row == tuple(action for action in long if action.microbatch < microbatches)


def test_what_is_not_possible_is_refused_with_all_reasons() -> None:
    assert legal_microbatches(4, 2, None, 1) == []
    assert legal_microbatches(4, 1, 1, 3) == []
    reasons = legal_microbatches(0, -1, True, 2.0)  # type: ignore[arg-type]
    assert [reason.split()[0] for reason in reasons] == ["ranks", "chunks", "microbatches", "group"]
    (reason,) = legal_microbatches(4, 2, 3, 8)
    assert "group (3) must be at least ranks (4)" in reason
    with pytest.raises(ValueError, match=r"not possible:\n  - ranks .*\n  - microbatches "):
        make_schedule(0, 1, 0)


def test_a_group_smaller_than_ranks_would_deadlock() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(megatron_schedule(3, 2, 1, 3))


def test_a_schedule_is_written_in_the_words_of_torch() -> None:
    assert to_csv(make_schedule(2, 1, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
