"""The simulator of offloading: a case by hand, its rules on random plans, and its judge against
broken timelines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadcheck import timeline_errors
from offloadtraces import make_trace, small_traces, speeds

from packgraph.offloading.plan import (
    KEPT,
    CopySpeed,
    OffloadGroup,
    OffloadPlan,
    OffloadTrace,
    plan_errors,
)
from packgraph.offloading.simulate import (
    OffloadTimeline,
    Passes,
    PlannedCopy,
    Wait,
    predicted,
    simulate_offload,
    with_releases,
)

SPEED = CopySpeed(1.0, 2.0, 0.0)
FOUR = make_trace([10, 10, 10, 10], [10.0, 10.0, 10.0, 10.0])
PLAN = OffloadPlan((True, False, True, False), (2, KEPT, 3, KEPT), 1)


def test_the_picture_of_the_module_comes_true() -> None:
    timeline = simulate_offload(FOUR, SPEED, PLAN)
    assert tuple(timeline.copies) == (
        PlannedCopy(0, True, 10, 10, 20),
        PlannedCopy(2, True, 30, 30, 40),
        PlannedCopy(2, False, 40, 40, 45),
        PlannedCopy(0, False, 60, 60, 65),
    )
    assert timeline.waits == [] and timeline.forward_end == 40 and timeline.end == 120
    assert [held for _, held in timeline.memory] == [
        0,
        10,
        20,
        30,
        20,
        30,
        20,
        30,
        20,
        30,
        20,
        10,
        0,
    ]
    assert timeline.peak_bytes == 30
    assert timeline_errors(FOUR, PLAN, timeline) == []


def test_other_microbatches_hold_what_is_kept() -> None:
    plan = predicted(replace(FOUR, slots=3, other_bytes=7), SPEED, PLAN)
    assert (
        plan.peak_bytes == 7 + 2 * 20 + 30
        and plan.kept_peak_bytes == 7 + 3 * 40
        and plan.saved_bytes == 50
    )
    assert (
        plan.moved_bytes == 20
        and plan.host_bytes == 60
        and plan.copy_us == 30
        and plan.exposed_us == 0
    )
    assert plan.hidden_us == 30 and plan.lost == 0


def nothing(trace: OffloadTrace) -> OffloadPlan:
    """Everything stays."""
    return OffloadPlan((False,) * len(trace.groups), (KEPT,) * len(trace.groups), 0)


@st.composite
def plans(draw: st.DrawFn, trace: OffloadTrace) -> OffloadPlan:
    """Any legal plan."""
    count, least = len(trace.groups), 0
    moves = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    reload_at = [KEPT] * count
    for place, index in enumerate(trace.backward_order):
        if moves[index]:
            least = draw(st.integers(least, place))
            reload_at[index] = trace.backward_order[least]
    release_at, least = [KEPT] * count, 0
    for index in (index for index in range(count) if moves[index]):
        least = draw(st.integers(max(index, least), count))
        release_at[index] = least if least < count else KEPT
    return OffloadPlan(
        tuple(moves),
        tuple(reload_at),
        draw(st.integers(0, 4)),
        release_at=draw(st.sampled_from([(), tuple(release_at)])),
    )


@given(st.data(), small_traces(), speeds())
def test_random_plans_keep_all_rules(
    data: st.DataObject, trace: OffloadTrace, speed: CopySpeed
) -> None:
    plan = data.draw(plans(trace))
    timeline = simulate_offload(trace, speed, plan)
    assert timeline_errors(trace, plan, timeline) == []
    figures = predicted(trace, speed, plan)
    assert timeline.end == pytest.approx(trace.compute_us + figures.exposed_us)
    assert -1e-6 <= figures.exposed_us <= figures.copy_us + 1e-6
    stays = trace.slots * (trace.bytes - figures.moved_bytes)
    assert figures.peak_bytes >= trace.other_bytes + max(
        0, stays - max(trace.backward_rooms, default=0)
    )
    assert predicted(trace, speed, nothing(trace)).peak_bytes == trace.kept_peak_bytes


@given(st.data(), small_traces(), speeds())
def test_no_copy_gets_worse_by_faster_copies_or_more_in_flight(
    data: st.DataObject, trace: OffloadTrace, speed: CopySpeed
) -> None:
    plan = data.draw(plans(trace))
    before = simulate_offload(trace, speed, plan)
    fast = CopySpeed(
        speed.to_host_bytes_per_us * 1.5, speed.to_device_bytes_per_us * 1.2, speed.latency_us / 2
    )
    assert simulate_offload(trace, fast, plan).exposed_us <= before.exposed_us + 1e-6
    plan = replace(plan, release_at=())
    before = simulate_offload(trace, speed, plan)
    freer = simulate_offload(trace, speed, replace(plan, in_flight=plan.in_flight + 1))
    assert freer.exposed_us <= before.exposed_us + 1e-6 and freer.peak_bytes >= before.peak_bytes


@given(st.data(), small_traces(), speeds())
def test_the_fast_passes_equal_the_simulator(
    data: st.DataObject, trace: OffloadTrace, speed: CopySpeed
) -> None:
    count = len(trace.groups)
    moves = tuple(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    in_flight, limit = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3 * trace.bytes + 20))
    passes = Passes(trace, speed)
    # Together with others, which must not matter.
    others = [moves, (True,) * count, (False,) * count]
    forwards = passes.forwards(
        np.array(others, dtype=bool).reshape(3, count), np.array([in_flight, 0, 1])
    )
    forward_us, forward_peak, kept = (
        column.tolist()[0]
        for column in (forwards.exposed_us, forwards.peak_bytes, forwards.kept_bytes)
    )
    backward = passes.backward(moves, kept, limit)
    assert backward is not None
    plan = with_releases(trace, speed, OffloadPlan(moves, backward.reload_at, in_flight))
    assert plan_errors(trace, plan) == []
    figures = predicted(trace, speed, plan)
    assert figures.peak_bytes == max(forward_peak, backward.peak_bytes)
    assert figures.exposed_us == pytest.approx(forward_us + backward.exposed_us)
    # A limit on waiting only cuts off what waits for longer.
    for most in (backward.exposed_us + 1e-6, backward.exposed_us - 1e-6):
        cut = passes.backward(moves, kept, limit, most)
        assert cut == (backward if most > backward.exposed_us or backward.exposed_us == 0 else None)
    inline = passes.backward(moves, kept, 0)
    assert inline is not None and inline.peak_bytes <= backward.peak_bytes
    assert backward.peak_bytes <= max(limit, inline.peak_bytes)


def altered(timeline: OffloadTimeline, **values: object) -> OffloadTimeline:
    vars(timeline).update(values)
    return timeline


def changed(timeline: OffloadTimeline, copy: int, **values: float) -> OffloadTimeline:
    timeline.copies[copy] = replace(timeline.copies[copy], **values)
    return timeline


def earlier(timeline: OffloadTimeline, held: int) -> OffloadTimeline:
    """The first time that memory is given back, given back before the copy ends."""
    timeline.memory[held - 1] = (timeline.memory[held - 1][0], timeline.memory[held - 1][1] - 10)
    return timeline


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda line: changed(line, 1, start=15.0, end=25.0), "before it was queued"),
        (
            lambda line: changed(line, 1, queued=10.0, start=15.0, end=25.0),
            "at one time or out of order",
        ),
        (
            lambda line: changed(line, 3, queued=15.0, start=15.0, end=20.0),
            "group 0 is reloaded before it is on the host|at one time",
        ),
        (
            lambda line: changed(line, 3, start=101.0, end=106.0),
            "backward of group 0 starts before it is back",
        ),
        (
            lambda line: changed(line, 3, queued=70.0, start=70.0, end=75.0),
            "reloaded later than the backward of 2",
        ),
        (
            lambda line: altered(line, copies=line.copies[1:]),
            "copied to the host are .2., not the moved groups .0, 2.",
        ),
        (lambda line: changed(line, 1, end=41.0), "forward ends before its copies"),
        (
            lambda line: changed(line, 0, end=31.0),
            "2 copies to the host are in flight after group 2, 1 may be",
        ),
        (
            lambda line: changed(line, 0, queued=11.0, start=11.0),
            "group 0 goes to the host later than it is made",
        ),
        (
            lambda line: altered(line, end=119.0),
            "until 119.0 us compute takes 120.0 us and waits 0",
        ),
        (
            lambda line: altered(line, waits=(Wait(2, False, 45.0, 50.0),)),
            "until 60.0 us compute .* and waits 5.0 us",
        ),
        (lambda line: earlier(line, 2), "at 15.0 us the device holds 0 bytes, and 10 are in use"),
        (
            lambda line: altered(line, memory=(*line.memory, (120.0, 1))),
            "1 bytes are held in the end, must be 0",
        ),
    ],
)
def test_the_judge_sees_what_is_wrong(broken, said: str) -> None:
    timeline = broken(simulate_offload(FOUR, SPEED, PLAN))
    with pytest.raises(AssertionError, match=said):
        assert not timeline_errors(FOUR, PLAN, timeline), "; ".join(
            timeline_errors(FOUR, PLAN, timeline)
        )


def test_impossible_traces_and_plans_are_refused_with_all_reasons() -> None:
    group = OffloadGroup("core_attn", 0, -1, 5.0, 9.0, copies=0)
    with pytest.raises(
        ValueError, match=r"(?s)slots is 0.*bytes is -1.*copies is 0.*after 5.0 us.*after 9.0 us"
    ):
        OffloadTrace((group,), 4.0, 8.0, slots=0)
    wrong = OffloadPlan((True, False, True, True), (3, 2, KEPT, 1), -1)
    with pytest.raises(
        ValueError,
        match=r"(?s)in_flight is -1.*group 1 .*does not move.*group 2 .*no group -1.*"
        r"group 3 .*comes after its own",
    ):
        simulate_offload(FOUR, SPEED, wrong)
    overtaking = OffloadPlan((True, False, True, False), (3, KEPT, 2, KEPT), 1)
    assert plan_errors(FOUR, overtaking) == [
        "group 0 is reloaded before group 2, which is needed earlier"
    ]
    with pytest.raises(ValueError, match="4 groups, the plan 1 moves, 0 reloads and 4 places"):
        simulate_offload(FOUR, SPEED, OffloadPlan((True,), (), 1))
