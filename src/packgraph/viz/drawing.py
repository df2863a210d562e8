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

LANE, LEFT, TOP, RIGHT = 34, 84, 76, 24
MOST_MARKS = 12  # of the ruler


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


def draw_lanes(
    title: str,
    subtitle: str,
    lanes: Sequence[str],
    blocks: Sequence[Block],
    span: float,
    *,
    width: float,
    unit: float = 1.0,
    legend: Sequence[tuple[str, str]] = (),
    note: str = "",
) -> str:
    """Draws blocks on lanes.

    Args:
        title: Of the drawing.
        subtitle: A quiet line below it.
        lanes: Their names, from top to bottom.
        blocks: In the order in which they are drawn.
        span: Time of the whole width.
        width: Pixels of the span.
        unit: Time between two whole numbers of the ruler.
        legend: Words, each with its colour.
        note: A quiet line at the end.

    Returns:
        The text of an SVG file.
    """
    scale, bottom = width / max(span, 1e-9), TOP + LANE * len(lanes)
    page, height = max(LEFT + round(width) + RIGHT, 640), bottom + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{page}" height="{height}" '
        f'viewBox="0 0 {page} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{page}" height="{height}"/>',
        _text(16, 26, title, "text title"),
        _text(16, 46, subtitle, "quiet"),
    ]
    sizes = (digit * 10.0**power for power in range(-4, 8) for digit in (1, 2, 5))
    step = next(size for size in sizes if size * MOST_MARKS * unit >= span)
    for mark in range(int(span / unit / step) + 1):
        x = LEFT + mark * step * unit * scale
        parts.append(f'<path class="line" d="M{x:.6g} {TOP - 6}V{bottom}"/>')
        parts.append(_text(x, TOP - 10, f"{mark * step:g}", "quiet small middle"))
    for lane, name in enumerate(lanes):
        box = f'x="{LEFT}" y="{TOP + lane * LANE}" width="{width:.6g}" height="{LANE - 2}"'
        parts.append(f'<rect class="lane" {box}/>')
        parts.append(_text(LEFT - 8, TOP + (lane + 0.6) * LANE, name, "text end"))
    parts += [_drawn(block, scale) for block in blocks]
    named = (f'<tspan fill="{shade}">■</tspan> {escape(words)} ' for words, shade in legend)
    parts.append(f'<text x="16" y="{bottom + 24}" class="text">{" ".join(named)}</text>')
    return "\n".join([*parts, _text(16, bottom + 48, note, "quiet"), "</svg>"]) + "\n"


def _drawn(block: Block, scale: float) -> str:
    x, y, width = LEFT + block.start * scale, TOP + block.lane * LANE, block.end - block.start
    width, height = max(width * scale, 0.5), block.lanes * LANE - 2
    box = f'x="{x:.6g}" y="{y}" width="{width:.6g}" height="{height}" fill="{block.colour}"'
    middle = y + height / 2 + (-2 if block.below else 4)
    words = (block.label, middle, "block"), (block.below, middle + 12, "block small")
    written = [_text(x + width / 2, at, word, f"{kind} middle") for word, at, kind in words if word]
    return f"<g><title>{escape(block.told)}</title><rect {box}/>{''.join(written)}</g>"


def _text(x: float, y: float, words: str, classes: str) -> str:
    """Words at a place; classes are those of the style."""
    return f'<text x="{x:.6g}" y="{y:.6g}" class="{classes}">{escape(words)}</text>'


def colour(hue: float, lightness: float, saturation: float = 0.55) -> str:
    """A colour by its hue, of which whole numbers are the same."""
    channels = colorsys.hls_to_rgb(hue % 1, lightness, saturation)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in channels)


def counted(number: int, word: str, plural: str = "s") -> str:
    """A number with its word: 1 slot, 2 slots."""
    return f"{number} {word}{plural if number != 1 else ''}"


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
