"""Drawings of offloading: blocks cover the time, a table in 120 columns, well-formed SVG, a
loadable Chrome trace."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadtraces import decoder_trace, make_trace, small_traces, speeds

from packgraph.offloading.plan import KEPT, CopySpeed, OffloadKnobs, OffloadPlan, OffloadTrace
from packgraph.offloading.search import plan_by_knobs
from packgraph.offloading.simulate import OffloadTimeline, simulate_offload
from packgraph.viz.offload import (
    COMPUTE,
    COPY,
    LANES,
    WAIT,
    chrome_trace,
    draw_offload_svg,
    offload_blocks,
    offload_table,
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


def test_the_table_has_a_line_per_rank_within_the_width() -> None:
    rows = []
    for slots in (4, 3):
        trace = decoder_trace(8, slots)
        rows.append((trace, *drawn(trace, CopySpeed(50_000.0, 25_000.0, 100.0), 0.25)))
    lines = offload_table(
        [(f"rank {rank}", *row) for rank, row in enumerate(rows, start=6)]
    ).splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) == 4
    assert re.match(
        r"rank 6  12 of 48  1.56 GiB +25%  18\.75 GiB  25.00 GiB  \d+.\d\d ms  \d+.\d\d ms  "
        r"\d.\d\d%  "
        r"4\d.\d GB/s  2\d.\d GB/s$",
        lines[1],
    )
    assert lines[2].startswith("rank 7") and " 18.75 GiB " in lines[2]
    nothing = "rank 0", EMPTY, *drawn(EMPTY, CopySpeed())
    assert offload_table([nothing]).splitlines()[1].split()[-2:] == ["-", "-"]


def test_the_svg_holds_every_block_and_needs_nothing_else() -> None:
    trace = make_trace([9, 4, 7, 5, 6, 8, 3], [3.0, 5.0, 4.0, 2.0, 6.0, 3.0, 4.0])
    plan = OffloadPlan(
        (True, False, True, True, False, False, False), (2, KEPT, 3, 3, KEPT, KEPT, KEPT), 1
    )
    timeline = simulate_offload(trace, CopySpeed(1.0, 1.0, 0.0), plan)
    assert timeline.waits
    text = draw_offload_svg(trace, plan, timeline, "a <title> & more")
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == "a <title> & more"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    groups, blocks = root.findall(f"{SVG}g"), offload_blocks(trace, timeline)
    assert len(groups) == len(blocks)
    for group, block in zip(groups, blocks):
        assert (group[0].text or "").startswith(block.kind)
        box = {name: float(group[1].attrib[name]) for name in ("x", "y", "width", "height")}
        assert box["x"] + box["width"] <= width and box["y"] + box["height"] <= height
    fills = {
        block.group: group[1].attrib["fill"]
        for group, block in zip(groups, blocks)
        if block.kind == COPY
    }
    assert len(set(fills.values())) == 3, "a colour per module"
    red = {group[1].attrib["fill"] for group, block in zip(groups, blocks) if block.kind == WAIT}
    assert len(red) == 1 and not red & set(fills.values())
    assert "3 of 7 groups move" in text and "prefers-color-scheme: dark" in text
    assert "http" not in text.replace(SVG.strip("{}"), "")
    assert (
        ElementTree.fromstring(draw_offload_svg(EMPTY, *drawn(EMPTY, CopySpeed()), "")) is not None
    )
