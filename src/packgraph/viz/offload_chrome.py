"""Offloading in the format of chrome://tracing and ui.perfetto.dev, so that it can be laid beside a
profile.

Complete events ("X", with ts and dur in microseconds) on three threads per rank, the device's
memory as a counter ("C"), names as metadata ("M"). Source: Trace Event Format, Google, 2016.
"""

import json
from collections.abc import Sequence
from typing import Any

from packgraph.offloading.plan import OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline
from packgraph.viz.offload_picture import COPY, LANES, OffloadBlock, offload_blocks


def chrome_trace(ranks: Sequence[tuple[str, OffloadTrace, OffloadTimeline]]) -> str:
    """The text of a JSON file; each rank, or chunk of one, is a process of its own, under its
    name."""
    events: list[dict[str, Any]] = []
    for rank, (name, trace, timeline) in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(LANES)
        ]
        events += [_event(rank, trace, block) for block in offload_blocks(trace, timeline)]
        events += [
            {"ph": "C", "name": "device memory", "pid": rank, "ts": time, "args": {"bytes": held}}
            for time, held in timeline.memory
        ]
    return (
        json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"
    )


def _event(rank: int, trace: OffloadTrace, block: OffloadBlock) -> dict[str, Any]:
    group = None if block.group is None else trace.groups[block.group]
    args: dict[str, float] = {} if group is None else {"layer": group.layer, "bytes": group.bytes}
    if group is not None and block.kind == COPY:
        args["GB/s"] = round(group.bytes / (block.end - block.start) / 1000, 6)
    name = "other" if group is None else f"{group.name} {group.layer}"
    return {
        "ph": "X",
        "name": f"{block.kind} {name}",
        "cat": block.kind,
        "pid": rank,
        "tid": LANES.index(block.lane),
        "ts": block.start,
        "dur": block.end - block.start,
        "args": args,
    }
