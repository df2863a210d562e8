"""Drawings of offloading: blocks cover the time, a table in 120 columns, well-formed SVG, a
loadable Chrome trace."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadtraces import small_traces, speeds

from packgraph.offloading.plan import CopySpeed, OffloadKnobs, OffloadPlan, OffloadTrace
from packgraph.offloading.search import plan_by_knobs
from packgraph.offloading.simulate import OffloadTimeline, simulate_offload
from packgraph.viz.offload import (
    COMPUTE,
    COPY,
    LANES,
    WAIT,
    chrome_trace,
    offload_blocks,
)

SVG = "{http://www.w3.org/2000/svg}"
EMPTY = OffloadTrace((), 0.0, 0.0)


def drawn(
    trace: OffloadTrace, speed: CopySpeed, fraction: float = 1.0
) -> tuple[OffloadPlan, OffloadTimeline]:
    plan = plan_by_knobs(trace, speed, OffloadKnobs(fraction, min_bytes=1, margin=0))
    return plan, simulate_offload(trace, speed, plan)


@given(small_traces(), speeds(), st.floats(0, 1))
def test_blocks_of_compute_and_waiting_fill_the_time(
    trace: OffloadTrace, speed: CopySpeed, fraction: float
) -> None:
    _, timeline = drawn(trace, speed, fraction)
    blocks = offload_blocks(trace, timeline)
    for lane in LANES:
        row = [block for block in blocks if block.lane == lane]
        assert all(one.end <= two.start + 1e-6 for one, two in pairwise(row))
    busy = [block.end - block.start for block in blocks if block.lane == COMPUTE]
    assert math.fsum(busy) == pytest.approx(timeline.end)
    waits = [block for block in blocks if block.kind == WAIT]
    assert math.fsum(block.end - block.start for block in waits) == pytest.approx(
        timeline.exposed_us
    )


@given(small_traces(), speeds())
def test_the_chrome_trace_loads_and_has_what_viewers_ask_for(
    trace: OffloadTrace, speed: CopySpeed
) -> None:
    _, timeline = drawn(trace, speed)
    found = json.loads(
        chrome_trace([("rank 0", trace, timeline), ("rank 1", EMPTY, drawn(EMPTY, speed)[1])])
    )
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    kinds = {"X": ("ts", "dur", "tid", "cat"), "C": ("ts", "args"), "M": ("args",)}
    for event in found["traceEvents"]:
        assert {"name", "ph", "pid", *kinds[event["ph"]]} <= set(event)
        assert all(event.get(field, 0) >= 0 for field in ("ts", "dur"))
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["ts"] + event["dur"]) for event in events] == [
        (LANES.index(block.lane), block.start, pytest.approx(block.end))
        for block in offload_blocks(trace, timeline)
    ]
    assert {event["name"] for event in found["traceEvents"] if event["ph"] == "M"} == {
        "process_name",
        "thread_name",
    }
    memory = [
        event["args"]["bytes"]
        for event in found["traceEvents"]
        if event["ph"] == "C" and event["pid"] == 0
    ]
    assert max(memory) == max(held for _, held in timeline.memory) >= timeline.peak_bytes
    copies = [event for event in events if event["cat"] == COPY and event["args"]["bytes"]]
    assert all(0 < event["args"]["GB/s"] <= 0.005 for event in copies)
