"""What a backward needs beside the groups is measured; memory is given back where the plan says,
after its copy."""

import gc
import weakref
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadkit import DENSE, config, same, train

from packgraph.graphs.copy_streams import DeviceMemory
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.offloading import runtime
from packgraph.offloading.plan import KEPT, CopySpeed, OffloadKnobs
from packgraph.offloading.runtime import OffloadRuntime
from packgraph.offloading.search import plan_by_knobs
from packgraph.offloading.timing import Headroom


class Told(EmulatedCopyStreams):
    """An allocator that says what it is told to: (now, most) one after another."""

    def __init__(self, *looks):
        super().__init__()
        self.looks = [(0, 0), *looks]

    def memory(self):
        return DeviceMemory(*self.looks.pop(0))


def test_room_is_what_the_backward_needs_beyond_the_forward():
    room = Headroom(Told((15, 18), (26, 30), (28, 28), (18, 37), (8, 27)))
    room.made(10)
    room.made(20)  # 10 beside them at the most
    room.reached(20, 20, 2)  # 8 between forward and backward
    room.reached(10, 10, 1)  # 17 beside 20
    room.reached(0, 0, 0)  # 17 beside 10
    assert room.nbytes == 7 and room.of([0, 1, 2]) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.booleans()
)
def test_rooms_are_no_larger_than_what_backwards_leave(modules, first_time):
    """modules: bytes that a backward hands on, and that it takes beside them. first_time: each
    makes a gradient, too, which stays. Without such ones what is handed on counts in full, and
    nothing else."""
    looks, needs, held, grown = [(100, 100), (100, 100)], [], 100, 0
    for handed, beside in modules:
        needs.append(handed + beside)
        looks.append(
            (
                held - 10 + grown + handed + 3 * first_time,
                held + grown + handed + beside + 3 * first_time,
            )
        )
        held, grown = held - 10, grown + 3 * first_time
    looks.append((held - 10 + grown, held + grown))  # nothing is handed on in the end
    room = Headroom(Told(*looks))
    room.made(100)
    for number in range(len(modules) + 2):
        room.reached(100 - 10 * number, 100 - 10 * number, number)
    rooms = room.of(range(len(modules)))
    assert rooms == tuple(max(0, *needs) - need for need in needs) or first_time
    if first_time:  # what is handed on may count as stayed, no more than that
        assert all(room.nbytes - left <= need for left, need in zip(rooms, needs))
        assert all(
            room.nbytes - left >= need - handed
            for left, need, (handed, _) in zip(rooms, needs, modules)
        )


@pytest.mark.parametrize(("policy", "looks"), [(False, runtime.LOOKS), (True, runtime.LOOKS + 4)])
def test_passes_are_traced_for_good_only_where_a_plan_will_end_it(policy, looks):
    copy_streams = EmulatedCopyStreams()
    made = runtime.OffloadRuntime([], copy_streams, policy=(lambda trace: None) if policy else None)
    traced = [made._begin(copy_streams).times is not None for _ in range(runtime.LOOKS + 4)]
    assert sum(traced) == looks and traced[0]


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_garbage_goes_before_memory_is_looked_at(is_looked_at, monkeypatch):
    """A large model of before that is collected within a traced pass leaves rooms that are not
    there."""

    class Cycle:
        def __init__(self):
            self.itself = self

    if is_looked_at:
        monkeypatch.setattr(EmulatedCopyStreams, "memory", lambda self: DeviceMemory(0, 0))
    gc.collect()
    gc.disable()
    try:
        living = weakref.ref(Cycle())
        assert living() is not None
        train(config(), DENSE, counts=(1,))
        assert (living() is None) == is_looked_at
    finally:
        gc.enable()


def given_back_at(offset):
    """A policy that gives memory back `offset` groups after each group, and would keep all copies
    in flight."""

    def policy(trace):
        plan = plan_by_knobs(trace, CopySpeed(), OffloadKnobs(min_bytes=1, margin=0, in_flight=99))
        at = [
            index + offset if moves and index + offset < len(plan.moves) else KEPT
            for index, moves in enumerate(plan.moves)
        ]
        return replace(plan, release_at=tuple(at))

    return policy


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.few(4)
def test_main_waits_for_a_copy_where_the_plan_gives_its_memory_back(
    granularity, offset, monkeypatch
):
    """As many copies are in flight when a group is made as the plan says, and no bit is another."""
    counts, left = (1, 1, 1), []
    release = OffloadRuntime._release

    def watched(self, now, place):
        release(self, now, place)
        if self.plan is not None and now.copy_streams in self._under_way:
            left.append((place, sum(not copy.done for copy in self._under_way[now.copy_streams])))

    monkeypatch.setattr(OffloadRuntime, "_release", watched)
    found, runtime, _ = train(
        config(),
        DENSE,
        granularity=granularity,
        counts=counts,
        late=("out",),
        policy=given_back_at(offset),
    )
    assert same(found, train(config(), counts=counts)[0])
    moved = [index for index, moves in enumerate(runtime.plan.moves) if moves]
    assert left and all(
        count == sum(place - offset < index <= place for index in moved) for place, count in left
    )


def on_their_way(runtime, copy_streams):
    return sum(not copy.done for copy in runtime._under_way.get(copy_streams, ()))


def test_a_copy_that_was_postponed_is_waited_for_at_the_next_commit(monkeypatch):
    """At its own commit, where the plan gives its memory back, it is not even queued."""
    commit, left = OffloadRuntime._commit, []

    def launching(self, now, group, *rest):
        commit(self, now, group, *rest)
        if self.plan is not None:
            left.append(on_their_way(self, now.copy_streams))
            self.copy_streams.launched()

    monkeypatch.setattr(OffloadRuntime, "_commit", launching)
    found, runtime, _ = train(
        config(), DENSE, counts=(1, 1), late=("out",), policy=given_back_at(0), postpones=True
    )
    assert same(found, train(config(), counts=(1, 1))[0])
    assert sum(runtime.plan.moves) > 1 and left and set(left) == {0}


def test_memory_is_given_back_at_a_later_group_where_a_pass_lacks_the_one_that_the_plan_names(
    monkeypatch,
):
    """As eager stages between graphs lack the groups that lie in these."""
    follow, commit, left = OffloadRuntime.follow, OffloadRuntime._commit, []

    def without_the_fourth(self, trace, plan):
        follow(self, trace, plan)
        del trace.places[trace.groups[3].layer, trace.groups[3].name, 0]

    def watched(self, now, group, *rest):
        commit(self, now, group, *rest)
        left.append((group.order, on_their_way(self, now.copy_streams)))

    monkeypatch.setattr(OffloadRuntime, "follow", without_the_fourth)
    monkeypatch.setattr(OffloadRuntime, "_commit", watched)
    train(config(), DENSE, counts=(1, 1), policy=given_back_at(1))
    after = dict(left[len(left) // 2 :])
    assert (after[2], after[3], after[4]) == (1, 1, 1), (
        "group 2 until group 4 is made; group 3 does not move now"
    )


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.few(2)
def test_main_waits_for_all_copies_when_a_forward_is_over(granularity, monkeypatch):
    """Whatever the plan lets be in flight: before another forward begins, and before its
    backward."""
    begin, reached, left = OffloadRuntime._begin, OffloadRuntime._reached, []

    def beginning(self, copy_streams):
        found = begin(self, copy_streams)
        left.append(on_their_way(self, copy_streams) if self.plan is not None else 0)
        return found

    def reaching(self, now, group):
        reached(self, now, group)
        left.append(on_their_way(self, now.copy_streams) if self.plan is not None else 0)

    monkeypatch.setattr(OffloadRuntime, "_begin", beginning)
    monkeypatch.setattr(OffloadRuntime, "_reached", reaching)
    counts = (1, 1, 2)
    found, runtime, _ = train(
        config(),
        DENSE,
        granularity=granularity,
        counts=counts,
        late=("out",),
        policy=given_back_at(99),
    )
    assert same(found, train(config(), counts=counts)[0])
    assert set(runtime.plan.release_at) == {KEPT} and runtime.plan.in_flight == 99
    assert left and set(left) == {0}


def test_memory_that_is_given_back_without_waiting_is_a_wrong_number(monkeypatch):
    """The control: a late copy reads what has been written there since."""

    def hasty(self, now, place):
        for at, reference in now.leaving:
            group = reference()
            if at <= place and group is not None and group.copy_out is not None:
                copy, done = group.copy_out, group.copy_out.done
                copy.finish()
                copy.done = done

    monkeypatch.setattr(OffloadRuntime, "_release", hasty)
    with pytest.raises(CaptureError, match="something else in a replay"):
        train(config(layers=3), DENSE, granularity="chunk", late=("out",), policy=given_back_at(1))
