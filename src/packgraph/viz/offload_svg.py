"""Offloading as SVG: compute, copies to the host and copies back on three lanes, and the device's
memory below.

Colours tell modules: compute and copies of a module have its colour, groups that stay are pale,
waiting is red. The memory is a filled line with that of all groups kept as a ruler. The file needs
no font, script or other file.
"""

import colorsys
from html import escape

from packgraph.graphs.memory.budget import shown
from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline
from packgraph.viz.offload_picture import COMPUTE, LANES, WAIT, OffloadBlock, offload_blocks
from packgraph.viz.svg_parts import number, page, ruler, text

WIDTH, LANE, LEFT, TOP, RIGHT, CHART, GAP = 1100, 34, 84, 76, 24, 120, 16
OUTSIDE, WAITING = "#8b949e", "#cf222e"


def draw_offload_svg(
    trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline, title: str
) -> str:
    """The whole drawing as the text of an SVG file."""
    scale = WIDTH / max(timeline.end, 1e-9)
    lanes_end = TOP + len(LANES) * LANE
    bottom = lanes_end + GAP + CHART
    width, height = LEFT + WIDTH + RIGHT, bottom + 64
    copies_us = timeline.copy_us(True) + timeline.copy_us(False)
    parts = page(
        width,
        height,
        title,
        f"{sum(plan.moves)} of {len(plan.moves)} groups move; copies of "
        f"{copies_us / 1000:.2f} ms, {timeline.exposed_us / 1000:.2f} ms of them exposed; peak "
        f"{shown(timeline.peak_bytes)}, {shown(trace.kept_peak_bytes)} without; time in ms",
    )
    parts += ruler(timeline.end, LEFT, WIDTH, TOP - 6, bottom)
    parts.append(_border(timeline, scale, bottom))
    for place, lane in enumerate(LANES):
        y = TOP + place * LANE
        parts.append(text(16, y + LANE / 2 + 4, lane, "text"))
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE - 2}"/>')
    parts += [_block(trace, plan, block, scale) for block in offload_blocks(trace, timeline)]
    parts += _memory(trace, timeline, scale, lanes_end + GAP)
    parts += _legend(trace, bottom)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _block(trace: OffloadTrace, plan: OffloadPlan, block: OffloadBlock, scale: float) -> str:
    """A rectangle; what it is stands in its tooltip."""
    told, colour = f"{block.kind}, outside of the groups", OUTSIDE
    if block.group is not None:
        group = trace.groups[block.group]
        told = f"{block.kind} of {group.name}, layer {group.layer}, {shown(group.bytes)}"
        is_pale = block.lane == COMPUTE and not plan.moves[block.group]
        colour = (
            WAITING if block.kind == WAIT else _colour(trace, group.name, 0.84 if is_pale else 0.62)
        )
    told += f", {block.start / 1000:.3f} to {block.end / 1000:.3f} ms"
    y = TOP + LANES.index(block.lane) * LANE
    return (
        f'<g><title>{escape(told)}</title><rect x="{number(LEFT + block.start * scale)}" y="{y}" '
        f'width="{number((block.end - block.start) * scale)}" height="{LANE - 2}" '
        f'fill="{colour}"/></g>'
    )


def _memory(trace: OffloadTrace, timeline: OffloadTimeline, scale: float, top: float) -> list[str]:
    """Bytes over time as steps, from 0 to what would be held without offloading."""
    most = max(trace.kept_peak_bytes, timeline.peak_bytes, 1)

    def height(held: int) -> str:
        return number(top + CHART - held / most * CHART)

    path = [f"M{LEFT} {number(top + CHART)}"]
    for time, held in timeline.memory:
        path.append(f"H{number(LEFT + time * scale)}V{height(held)}")
    path.append(f"H{number(LEFT + timeline.end * scale)}V{number(top + CHART)}Z")
    peak = timeline.peak_bytes
    return [
        f'<path d="{"".join(path)}" fill="{OUTSIDE}" fill-opacity="0.45"/>',
        f'<line class="line" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{height(peak)}" '
        f'y2="{height(peak)}"/>',
        f'<line class="line" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{height(most)}" '
        f'y2="{height(most)}"/>',
        text(16, top + CHART / 2 + 4, "memory", "text"),
        text(LEFT + WIDTH, float(height(peak)) - 3, f"peak {shown(peak)}", "quiet small end"),
        text(LEFT + WIDTH, float(height(most)) - 3, f"{shown(most)} without", "quiet small end"),
    ]


def _border(timeline: OffloadTimeline, scale: float, bottom: float) -> str:
    x = number(LEFT + timeline.forward_end * scale)
    return (
        f'<line stroke="{OUTSIDE}" stroke-dasharray="4 3" x1="{x}" x2="{x}" y1="{TOP}" '
        f'y2="{bottom}"><title>end of '
        "the forward</title></line>"
    )


def _legend(trace: OffloadTrace, top: float) -> list[str]:
    parts, x = [], 16
    for name in _names(trace):
        parts.append(
            f'<rect x="{x}" y="{top + 14}" width="20" height="12" '
            f'fill="{_colour(trace, name, 0.62)}"/>'
        )
        parts.append(text(x + 26, top + 24, name, "text"))
        x += 46 + 7 * len(name)
    parts.append(f'<rect x="{x}" y="{top + 14}" width="20" height="12" fill="{WAITING}"/>')
    parts.append(text(x + 26, top + 24, "compute waits", "text"))
    parts.append(
        text(
            16,
            top + 50,
            "pale: groups that stay; grey: outside of the groups; broken line: end of the "
            "forward; memory: all microbatches in flight",
            "quiet",
        )
    )
    return parts


def _names(trace: OffloadTrace) -> list[str]:
    return list(dict.fromkeys(group.name for group in trace.groups))


def _colour(trace: OffloadTrace, name: str, lightness: float) -> str:
    """One hue per module, none of them the red of waiting."""
    hue = 0.1 + _names(trace).index(name) / max(len(_names(trace)), 1) * 0.8
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.5)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
