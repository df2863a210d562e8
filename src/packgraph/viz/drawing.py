"""Blocks on lanes over time, drawn as SVG, and tables as text.

Schedules, plans of contexts and offloading are all lanes of blocks. `draw_lanes` writes an SVG file
that needs no font, script or other file. The colours of page and writing follow the reader's theme,
those of blocks are mid tones with dark writing on either. Every block has a tooltip.
"""

import colorsys
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e }
  .lane { fill: #eff2f5 } .line { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .lane { fill: #1b2129 } .line { stroke: #3d444d }
  }
  text { font: 12px ui-sans-serif, system-ui, sans-serif } .small { font-size: 10px } .block { fill: #14181d }
  .middle { text-anchor: middle } .end { text-anchor: end } .title { font-weight: 600; font-size: 14px }"""  # noqa: E501


LANE, LEFT, TOP, RIGHT, GAP = 34, 84, 76, 24, 14


class Block(NamedTuple):
    """A box from `start` to `end` on `lanes` lanes from `lane` on.

    Attributes:
        told: Its tooltip.
        label: Stands in it, `below` under that.
    """

    lane: int
    start: float
    end: float
    colour: str
    told: str
    label: str = ""
    below: str = ""
    lanes: int = 1


class Lane(NamedTuple):
    """A lane with its name, and that of the group that begins with it."""

    name: str = ""
    group: str = ""


def lane_top(lanes: Sequence[Lane], lane: int) -> int:
    """Vertical position of a lane's top: groups of several lanes have gaps between them."""
    gap = GAP if any(not each.group for each in lanes) else 0
    return TOP + lane * LANE + gap * (sum(bool(each.group) for each in lanes[: lane + 1]) - 1)


def draw_lanes(
    title: str,
    subtitle: str,
    lanes: Sequence[Lane],
    blocks: Sequence[Block],
    span: float,
    *,
    width: float,
    unit: float = 1.0,
    legend: Sequence[tuple[str, Sequence[str]]] = (),
    notes: Sequence[str] = (),
    under: Sequence[str] = (),
    under_height: int = 0,
) -> str:
    """Draws blocks on lanes.

    Args:
        title: Of the drawing.
        subtitle: A quiet line below it.
        lanes: From top to bottom.
        blocks: In the order in which they are drawn.
        span: Time of the whole width.
        width: Pixels of the span.
        unit: Time between two whole numbers of the ruler.
        legend: Words, each with its colours.
        notes: Lines at the end.
        under: Further elements below the lanes.
        under_height: Pixels that they take.

    Returns:
        The text of an SVG file.
    """
    scale = width / max(span, 1e-9)
    tops = [lane_top(lanes, lane) for lane in range(len(lanes))]
    bottom = tops[-1] + LANE + under_height
    page_width = max(LEFT + round(width) + RIGHT, 640)
    height = bottom + 24 * (len(notes) + bool(legend)) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{page_width}" height="{height}" '
        f'viewBox="0 0 {page_width} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{page_width}" height="{height}"/>',
        text(16, 26, title, "text title"),
        text(16, 46, subtitle, "quiet"),
        *_ruler(span / unit, scale * unit, bottom),
    ]
    for lane, top in zip(lanes, tops, strict=True):
        parts.append(text(16, top + LANE / 2 + 4, lane.group, "text"))
        parts.append(text(LEFT - 8, top + LANE / 2 + 3, lane.name, "quiet end"))
        parts.append(rectangle("lane", LEFT, top, width, LANE - 2))
    parts += [_drawn(block, tops[block.lane], scale) for block in blocks]
    parts += under
    x = 16.0
    for words, colours in legend:
        for colour in colours:
            parts.append(rectangle("", x, bottom + 14, 12, 12, colour))
            x += 12
        parts.append(text(x + 6, bottom + 24, words, "text"))
        x += 20 + 7 * len(words)
    for line, note in enumerate(notes):
        parts.append(text(16, bottom + 24 * (line + bool(legend)) + 24, note, "quiet"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(block: Block, top: float, scale: float) -> str:
    x, width = LEFT + block.start * scale, max((block.end - block.start) * scale, 0.5)
    height = block.lanes * LANE - 2
    middle = top + height / 2 + (-2 if block.below else 4)
    words = [
        (block.label, middle, "block middle"),
        (block.below, middle + 12, "block small middle"),
    ]
    written = [text(x + width / 2, y, word, style) for word, y, style in words if word]
    box = rectangle("", x, top, width, height, block.colour)
    return f"<g><title>{escape(block.told)}</title>{box}{''.join(written)}</g>"


def rectangle(style: str, x: float, y: float, width: float, height: float, colour: str = "") -> str:
    """A box of a class of the style, or of a colour."""
    filled = f'fill="{colour}"' if colour else f'class="{style}"'
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {place} {filled}/>"


def line(x1: float, y1: float, x2: float, y2: float, style: str = 'class="line"') -> str:
    """A line between two points."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f"<line {ends} {style}/>"


def colour(hue: float, lightness: float, saturation: float = 0.55) -> str:
    """A colour by its hue, of which whole numbers are the same."""
    channels = colorsys.hls_to_rgb(hue % 1, lightness, saturation)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in channels)


def text(x: float, y: float, words: str, classes: str) -> str:
    """Words at a place; classes are those of the style."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{classes}">{escape(words)}</text>'


def number(value: float) -> str:
    """Formats a number with at most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _ruler(span: float, scale: float, bottom: float) -> list[str]:
    """About ten lines at 1, 2 or 5 times a power of ten, named above."""
    sizes = [unit * 10.0**power for power in range(-4, 7) for unit in (1, 2, 5)]
    step = next((size for size in sizes if size * 12 >= span), 1e7)
    marks = []
    for mark in range(int(span / step) + 1):
        x = LEFT + mark * step * scale
        marks += [line(x, TOP - 6, x, bottom)]
        marks += [text(x, TOP - 10, f"{mark * step:g}", "quiet small middle")]
    return marks


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """One line per row: the first column to the left, the others to the right, two spaces
    between."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in table
    ]
