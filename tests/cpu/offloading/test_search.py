"""The search for plans of offloading: equal to all there is in small cases, never worse by more
means, quick."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadcheck import timeline_errors
from offloadtraces import (
    decoder_trace,
    make_trace,
    small_traces,
    speeds,
)

from packgraph.offloading.plan import KEPT, CopySpeed, OffloadPlan, OffloadTrace
from packgraph.offloading.search import candidates, plan_for_bytes, plan_for_time
from packgraph.offloading.simulate import predicted, simulate_offload, with_releases

H200 = CopySpeed(50_000.0, 52_000.0, 10.0)
NEAR = 1e-5


def every_plan(trace: OffloadTrace, speed: CopySpeed) -> list[OffloadPlan]:
    """All legal plans that give back what has left, with their figures."""
    place, late = trace.backward_place, trace.backward_order
    found = []
    # A copy of nothing would be a place to wait at, and no more; it is none that a program could
    # make.
    for moves in product(*((False, True) if group.bytes else (False,) for group in trace.groups)):
        starts = [
            trace.backward_order[: trace.backward_place[index] + 1] if moved else (KEPT,)
            for index, moved in enumerate(moves)
        ]
        for reload_at in product(*starts):
            queued = [place[reload_at[index]] for index in late if moves[index]]
            if queued != sorted(queued):
                continue
            found += [
                predicted(
                    trace,
                    speed,
                    with_releases(trace, speed, OffloadPlan(moves, reload_at, in_flight)),
                )
                for in_flight in range(sum(moves) + 1)
            ]
    return found


@given(small_traces(most=4), speeds(), st.floats(0, 1.1), st.sampled_from([0.0, 0.02, 0.1, 0.5]))
def test_small_cases_have_the_best_of_all_plans(
    trace: OffloadTrace, speed: CopySpeed, share: float, lost: float
) -> None:
    plans = every_plan(trace, speed)
    budget = int(share * trace.kept_peak_bytes)
    fitting = [plan.exposed_us for plan in plans if plan.peak_bytes <= budget]
    if fitting:
        found = plan_for_bytes(trace, speed, budget)
        assert found.peak_bytes <= budget and found.exposed_us == pytest.approx(
            min(fitting), abs=NEAR
        )
    else:
        with pytest.raises(ValueError, match="no plan of offloading fits"):
            plan_for_bytes(trace, speed, budget)
    quick = min(
        plan.peak_bytes for plan in plans if plan.exposed_us <= lost * trace.compute_us + NEAR / 10
    )
    assert plan_for_time(trace, speed, lost).peak_bytes == quick
    assert plan_for_time(trace, speed, float("inf")).peak_bytes == min(
        plan.peak_bytes for plan in plans
    )


@pytest.mark.parametrize("order", [(40, 30, 20, 10, 0), (10, 40, 0, 20, 30)])
@pytest.mark.few(2)
def test_five_groups_have_the_best_of_all_plans(order: tuple[int, ...]) -> None:
    """Backwards in another order included."""
    trace = make_trace([9, 4, 7, 5, 6], [3.0, 5.0, 4.0, 2.0, 6.0])
    groups = tuple(
        replace(group, backward_us=float(start)) for group, start in zip(trace.groups, order)
    )
    trace, speed = replace(trace, groups=groups, backward_us=50.0), CopySpeed(1.2, 0.5, 0.5)
    plans = every_plan(trace, speed)
    assert len(plans) > 500
    waits = []
    for budget in range(13, 32, 3):
        fitting = [plan.exposed_us for plan in plans if plan.peak_bytes <= budget]
        waits.append(min(fitting))
        assert plan_for_bytes(trace, speed, budget).exposed_us == pytest.approx(waits[-1], abs=NEAR)
    assert waits[0] > waits[2] > waits[-1] == 0, (
        "budgets that are hard, less hard, and large enough for all"
    )


@given(
    small_traces(most=14), speeds(), st.floats(0.2, 1), st.floats(0, 0.3), st.sampled_from([0, 5])
)
def test_more_means_are_never_worse(
    trace: OffloadTrace, speed: CopySpeed, share: float, lost: float, few: int
) -> None:
    budget = int(share * trace.kept_peak_bytes)
    fast = CopySpeed(
        speed.to_host_bytes_per_us * 1.3, speed.to_device_bytes_per_us * 1.1, speed.latency_us * 0.9
    )
    try:
        plan = plan_for_bytes(trace, speed, budget, few=few)
    except ValueError:
        assert plan_for_time(trace, speed, float("inf"), few=few).peak_bytes > budget
    else:
        assert plan.peak_bytes <= budget
        assert timeline_errors(trace, plan, simulate_offload(trace, speed, plan)) == []
        assert plan == plan_for_bytes(trace, speed, budget, few=few)
        more = budget + max(budget // 7, 1)
        assert plan_for_bytes(trace, speed, more, few=few).exposed_us <= plan.exposed_us + NEAR
        assert plan_for_bytes(trace, fast, budget, few=few).exposed_us <= plan.exposed_us + NEAR
    quick = plan_for_time(trace, speed, lost, few=few)
    assert (
        quick.exposed_us <= lost * trace.compute_us + NEAR
        and quick.peak_bytes <= trace.kept_peak_bytes
    )
    assert plan_for_time(trace, speed, lost + 0.05, few=few).peak_bytes <= quick.peak_bytes
    assert plan_for_time(trace, fast, lost, few=few).peak_bytes <= quick.peak_bytes


@given(small_traces(most=10), st.data())
def test_candidates_are_legal_and_follow_from_the_trace_alone(
    trace: OffloadTrace, data: st.DataObject
) -> None:
    count = len(trace.groups)
    movable = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    for few in (0, 5):
        found = candidates(trace, movable, few)
        pairs = list(zip(map(tuple, found[0].tolist()), found[1].tolist(), strict=True))
        assert len(pairs) == len(set(pairs)) and pairs[0][0] == (False,) * count
        assert all(may or not moved for moves, _ in pairs for may, moved in zip(movable, moves))
        most = tuple(may and group.bytes > 0 for may, group in zip(movable, trace.groups))
        assert most in {moves for moves, _ in pairs}
        again = candidates(replace(trace, slots=trace.slots + 1, other_bytes=5), movable, few)
        assert [part.tolist() for part in again] == [part.tolist() for part in found]


@pytest.mark.parametrize("slots", [1, 4])
def test_an_8b_shaped_stack_moves_what_the_link_carries(slots: int) -> None:
    trace = decoder_trace(43, slots)
    most = 50_000.0 * trace.forward_us / trace.bytes
    plan = plan_for_time(trace, H200, 0.01)
    assert plan.lost <= 0.01 and 0.9 * most < plan.moved_bytes / trace.bytes < 1.1 * most
    assert plan.peak_bytes < (1.05 - 0.9 * most) * trace.kept_peak_bytes
    assert plan.moves[-1] is False, "what the backward needs first stays"
    half = plan_for_bytes(trace, H200, trace.kept_peak_bytes * 3 // 4)
    assert half.lost < 0.001 and half.peak_bytes <= trace.kept_peak_bytes * 3 // 4
    small = tuple(group.name == "mlp_act" for group in trace.groups)
    only = plan_for_bytes(trace, H200, trace.kept_peak_bytes * 3 // 4, small)
    assert all(may or not moved for may, moved in zip(small, only.moves))


def test_what_cannot_be_is_said() -> None:
    trace = make_trace([2**30] * 4, [10.0] * 4, other_bytes=2**30)
    with pytest.raises(
        ValueError,
        match=r"fits in 1.50 GiB: the least .* is 2.00 GiB \(without offloading 5.00 "
        r"GiB, of which 1.00 GiB are not",
    ):
        plan_for_bytes(trace, CopySpeed(), 3 * 2**29)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        plan_for_time(trace, CopySpeed(), -1)
    with pytest.raises(ValueError, match="4 groups, and 1 are said"):
        plan_for_time(trace, CopySpeed(), 0.0, (True,))
