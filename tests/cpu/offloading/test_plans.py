"""Any legal plan is followed, and changes no bit: random sets, reloads, copies under way and
copy streams."""

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offloadkit import DENSE, config, same, train

from packgraph.offloading.plan import KEPT, OffloadPlan, plan_errors

COUNTS = (1, 1, 2)


@cache
def kept():
    return train(config(), counts=COUNTS)[0]


def drawn_plan(data, trace):
    """A plan with reloads anywhere before their group's backward, in the order of those."""
    order, first = trace.backward_order, 0
    moves, starts = [False] * len(order), [KEPT] * len(order)
    for place, index in enumerate(order):
        moves[index] = data.draw(st.booleans(), label="moves")
        if moves[index]:
            first = data.draw(st.integers(first, place), label="reload at")
            starts[index] = order[first]
    ends, least = [KEPT] * len(order), 0
    for index in (index for index, moved in enumerate(moves) if moved):
        least = data.draw(st.integers(max(index, least), len(order)), label="give back at")
        ends[index] = least if least < len(order) else KEPT
    plan = OffloadPlan(
        tuple(moves),
        tuple(starts),
        data.draw(st.integers(0, 5), label="in flight"),
        release_at=tuple(ends),
    )
    assert plan_errors(trace, plan) == []
    return plan


@pytest.mark.parametrize(
    "granularity",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param("layer", marks=pytest.mark.slow),
        "chunk",
    ],
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_plan_is_followed_without_a_changed_bit(granularity, data):
    late = data.draw(st.sets(st.sampled_from(("out", "back"))), label="late")
    found, runtime, _ = train(
        config(),
        DENSE,
        granularity=granularity,
        counts=COUNTS,
        late=tuple(late),
        policy=lambda trace: drawn_plan(data, trace),
    )
    assert same(found, kept())
    assert runtime.plan is not None


def test_a_plan_that_cannot_be_followed_is_refused():
    _, runtime, _ = train(config(), DENSE, counts=(1,))
    count = len(runtime.trace.groups)
    with pytest.raises(ValueError, match="the trace has 12 groups, the plan 1 moves"):
        runtime.follow(runtime.trace, OffloadPlan((True,), (0,), 2))
    with pytest.raises(ValueError, match="comes after its own"):
        runtime.follow(runtime.trace, OffloadPlan((True,) * count, (0,) * count, 2))
