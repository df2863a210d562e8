"""Which blocks of a pool the allocator's history tells of, by events as torch gives them."""

from types import SimpleNamespace

import pytest
import torch

from packgraph.graphs.cuda.backend import CudaWindow
from packgraph.graphs.cuda.history import PoolHistory, blocks_of
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.memory.bank import Lifetime

KEPT, BRIEF, OTHER = (0, 1), (0, 2), (0, 0)
POOLS = {KEPT: False, BRIEF: True}
MANY = 2**20


def segment(address, size, pool):
    return {"address": address, "total_size": size, "segment_pool_id": pool, "device": 0}


def event(action, address, size):
    return {"action": action, "addr": address, "size": size}


def test_blocks_of_both_pools_are_told_in_the_order_of_their_births():
    segments = [segment(9000, 500, BRIEF), segment(1000, 500, KEPT)]
    events = [
        event("segment_alloc", 1000, 500),
        event("alloc", 1000, 100),
        event("alloc", 5000, 70),
        event("segment_alloc", 9000, 500),
        event("alloc", 9000, 200),
        event("free_requested", 1000, 100),
        event("free_completed", 1000, 100),
        event("alloc", 1000, 50),
        event("free_completed", 5000, 70),
        event("free_completed", 9000, 200),
    ]
    assert blocks_of(segments, events, POOLS) == [
        Lifetime(100, 1, 6),
        Lifetime(200, 4, 9, True),
        Lifetime(50, 7),
    ]


@pytest.mark.parametrize("again", ["segment_alloc", "segment_map"])
def test_what_lay_there_before_was_another_pools(again):
    """Addresses come again: of segments given back, and of pages that were unmapped."""
    events = [
        event("segment_alloc", 1000, 500),
        event("alloc", 1000, 100),
        event("alloc", 1200, 10),
        event("free_completed", 1000, 100),
        event("segment_free", 1000, 500),
        event(again, 1000, 500),
        event("alloc", 1200, 30),
        event("free_completed", 1200, 30),
    ]
    assert blocks_of([segment(1000, 500, KEPT)], events, POOLS) == [Lifetime(30, 6, 7)]


def test_pages_added_to_a_segment_leave_its_blocks():
    events = [
        event("segment_map", 1000, 100),
        event("alloc", 1000, 80),
        event("segment_map", 1100, 200),
        event("alloc", 1080, 150),
    ]
    assert blocks_of([segment(1000, 300, KEPT)], events, POOLS) == [
        Lifetime(80, 1),
        Lifetime(150, 3),
    ]


def test_a_failed_allocation_has_no_address_and_is_no_block():
    events = [event("segment_alloc", 1000, 100), {"action": "oom", "device_free": 5, "size": 2**40}]
    assert blocks_of([segment(1000, 100, KEPT)], events, POOLS) == []


def test_a_history_that_begins_too_late_is_refused():
    events = [event("alloc", 1000, 100)]
    with pytest.raises(CaptureError, match="max_entries"):
        blocks_of([segment(1000, 500, KEPT)], events, POOLS)


@pytest.fixture
def torchs(monkeypatch):
    """torch's own recording: whether it is on, and what was asked of it."""
    state = {"on": False, "asked": []}

    def record(enabled="all", context="all"):
        state["asked"].append((enabled, context))
        state["on"] = enabled is not None

    shot = {
        "segments": [
            segment(1000, 500, KEPT),
            segment(4000, 500, OTHER),
            segment(1000, 500, KEPT) | {"device": 1},
        ],
        "device_traces": [[], [event("segment_alloc", 1000, 500), event("alloc", 1000, MANY)]],
    }
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: state["on"], raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: shot)
    return state


def test_recording_begins_and_ends_with_it(torchs):
    history = PoolHistory(torch.device("cuda", 1))
    history.start()
    assert torchs["on"] and history.lifetimes(POOLS) == [Lifetime(MANY, 1)], (
        "of its device and pools alone"
    )
    history.stop()
    assert torchs["asked"] == [("all", None), (None, "all")]


def test_a_recording_of_somebody_else_goes_on(torchs):
    torchs["on"] = True
    history = PoolHistory(torch.device("cuda", 1))
    history.start()
    history.stop()
    assert torchs["on"] and not torchs["asked"]


@pytest.fixture
def window():
    """A window on a device that nobody has, with the pools of `torchs`."""
    made = object.__new__(CudaWindow)
    made.backend, made._noted = SimpleNamespace(device=torch.device("cuda", 1)), None
    made.pool, made.brief = SimpleNamespace(handle=KEPT), SimpleNamespace(handle=BRIEF)
    return made


def test_a_trial_knows_its_blocks_when_it_is_over(torchs, window):
    with window.noting():
        assert torchs["on"]
        with pytest.raises(AssertionError, match="is open yet"):
            window.lifetimes()
    assert window.lifetimes() == [Lifetime(MANY, 1)] and not torchs["on"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_trial_that_fails_stops_recording(torchs, window, error):
    with pytest.raises(error), window.noting():
        raise error
    assert not torchs["on"] and window._noted is None
