"""Offloading drawn: a table with a line per rank, SVG, and a Chrome trace.

All show blocks of compute, waiting and copies on three lanes, from a timeline that was simulated or
measured, so that both can be laid side by side.

In SVG colours tell modules: compute and copies of a module have its colour, groups that stay are
pale, waiting is red.

The Chrome trace is for chrome://tracing and ui.perfetto.dev, beside a profile: complete events
("X", with ts and dur in microseconds) on three threads per rank, the device's memory as a counter
("C"), names as metadata ("M"). Source: Trace Event Format, Google, 2016.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packgraph.graphs.memory.budget import shown
from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline
from packgraph.viz.drawing import Block, aligned, colour, draw_lanes

COMPUTE, TO_HOST, TO_DEVICE = LANES = ("compute", "to host", "to device")
FORWARD, BACKWARD, WAIT, COPY = "forward", "backward", "wait", "copy"
HEADER = (
    "",
    "groups",
    "moved",
    "of kept",
    "peak",
    "without",
    "hidden",
    "exposed",
    "lost",
    "to host",
    "to device",
)
WIDTH = 1100
OUTSIDE, WAITING = "#8b949e", "#cf222e"


@dataclass(frozen=True)
class OffloadBlock:
    """Something that takes time. group: index of the group that is computed, waited for or copied,
    None for what lies outside of all groups. Times in us from the start of the forward."""

    lane: str
    kind: str
    group: int | None
    start: float
    end: float


def offload_blocks(trace: OffloadTrace, timeline: OffloadTimeline) -> list[OffloadBlock]:
    """All of them by lane and time, those of no length left out."""
    blocks, before_us, time = [], 0.0, 0.0
    for index, group in enumerate(trace.groups):
        blocks.append(
            OffloadBlock(COMPUTE, FORWARD, index, time, time + group.forward_us - before_us)
        )
        before_us, time = group.forward_us, timeline.commits[index]
    blocks.append(OffloadBlock(COMPUTE, FORWARD, None, time, time + trace.forward_us - before_us))
    order = trace.backward_order
    marks = [*(trace.groups[index].backward_us for index in order), trace.backward_us]
    blocks.append(
        OffloadBlock(COMPUTE, BACKWARD, None, timeline.forward_end, timeline.forward_end + marks[0])
    )
    blocks += [
        OffloadBlock(
            COMPUTE,
            BACKWARD,
            index,
            timeline.backwards[index],
            timeline.backwards[index] + marks[place + 1] - marks[place],
        )
        for place, index in enumerate(order)
    ]
    blocks += [
        OffloadBlock(COMPUTE, WAIT, wait.group, wait.start, wait.end) for wait in timeline.waits
    ]
    blocks += [
        OffloadBlock(TO_HOST if copy.to_host else TO_DEVICE, COPY, copy.group, copy.start, copy.end)
        for copy in timeline.copies
    ]
    blocks.sort(key=lambda block: (LANES.index(block.lane), block.start))
    return [block for block in blocks if block.end > block.start]


def offload_table(
    ranks: Sequence[tuple[str, OffloadTrace, OffloadPlan, OffloadTimeline]],
) -> str:
    """A line for every rank, or every chunk of it, with its name: per microbatch, but for the
    peaks, which are those of the device. At most 120 columns for short names; ends with a
    newline."""
    table = [list(HEADER)]
    for name, trace, plan, timeline in ranks:
        copied = sum(group.bytes for group, moves in zip(trace.groups, plan.moves) if moves)
        host_us, device_us = timeline.copy_us(True), timeline.copy_us(False)
        exposed = timeline.exposed_us
        table.append(
            [
                name,
                f"{sum(plan.moves)} of {len(plan.moves)}",
                shown(copied),
                f"{copied / max(trace.bytes, 1):.0%}",
                shown(timeline.peak_bytes),
                shown(trace.kept_peak_bytes),
                f"{(host_us + device_us - exposed) / 1000:.2f} ms",
                f"{exposed / 1000:.2f} ms",
                f"{exposed / trace.compute_us if trace.compute_us else 0.0:.2%}",
                _speed(copied, host_us),
                _speed(copied, device_us),
            ]
        )
    told = (
        "moved, hidden, exposed: per microbatch; of kept: of what groups keep; lost: "
        "exposed over compute; peak: all in flight"
    )
    return "\n".join([*aligned(table), told]) + "\n"


def _speed(nbytes: int, us: float) -> str:
    return f"{nbytes / us / 1000:.1f} GB/s" if us > 0 else "-"


def draw_offload_svg(
    trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline, title: str
) -> str:
    """The whole drawing as the text of an SVG file."""
    copies_us = timeline.copy_us(True) + timeline.copy_us(False)
    names = list(dict.fromkeys(group.name for group in trace.groups))
    # One hue per module, none of them the red of waiting.
    hues = {name: 0.1 + place / len(names) * 0.8 for place, name in enumerate(names)}
    modules = [(name, colour(hue, 0.62, 0.5)) for name, hue in hues.items()]
    return draw_lanes(
        title,
        f"{sum(plan.moves)} of {len(plan.moves)} groups move; copies of "
        f"{copies_us / 1000:.2f} ms, {timeline.exposed_us / 1000:.2f} ms of them exposed; peak "
        f"{shown(timeline.peak_bytes)}, {shown(trace.kept_peak_bytes)} without; time in ms",
        LANES,
        [_drawn(trace, plan, block, hues) for block in offload_blocks(trace, timeline)],
        timeline.end,
        width=WIDTH,
        unit=1000,
        legend=[*modules, ("compute waits", WAITING)],
        note="pale: groups that stay; grey: outside of the groups; trace.json has the memory",
    )


def _drawn(
    trace: OffloadTrace, plan: OffloadPlan, block: OffloadBlock, hues: Mapping[str, float]
) -> Block:
    """A box; what it is stands in its tooltip."""
    told, shade = f"{block.kind}, outside of the groups", OUTSIDE
    if block.group is not None:
        group = trace.groups[block.group]
        told = f"{block.kind} of {group.name}, layer {group.layer}, {shown(group.bytes)}"
        is_pale = block.lane == COMPUTE and not plan.moves[block.group]
        shade = colour(hues[group.name], 0.84 if is_pale else 0.62, 0.5)
    told += f", {block.start / 1000:.3f} to {block.end / 1000:.3f} ms"
    shade = WAITING if block.kind == WAIT else shade
    return Block(LANES.index(block.lane), block.start, block.end, shade, told)


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
