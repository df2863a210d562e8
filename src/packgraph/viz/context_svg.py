"""A plan of dynamic context parallelism as SVG: a lane per rank, time to the right, groups across
their ranks' lanes.

A group is a box over the lanes of its ranks. Its documents divide it in proportion to their tokens,
and what stays pale is padding. Colours tell the size of the group. The file needs no font, script
or other file.
"""

import colorsys
from html import escape

from packgraph.parallel.context.plan import ContextPlan, RowGroup
from packgraph.viz.svg import STYLE

WIDTH, LANE, LEFT, TOP, RIGHT = 1100, 34, 84, 76, 24
DIGIT = 7  # pixels of a character


def draw_context_svg(plan: ContextPlan, title: str) -> str:
    """The whole drawing as the text of an SVG file."""
    world = plan.request.world
    bottom = TOP + world * LANE
    width, height = LEFT + WIDTH + RIGHT, bottom + 56
    scale = WIDTH / max(plan.step_us, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        _text(16, 26, title, "text title"),
        _text(
            16,
            46,
            f"{plan.step_us / 1000:.1f} ms predicted, {plan.balance:.1%} of the lower bound; "
            "padding "
            f"{plan.padding:.2%}; time in ms",
            "quiet",
        ),
        *_ruler(plan.step_us, scale, bottom),
    ]
    for rank in range(world):
        parts.append(_text(16, TOP + rank * LANE + LANE / 2 + 4, f"rank {rank}", "text"))
        parts.append(
            f'<rect class="lane" x="{LEFT}" y="{TOP + rank * LANE}" width="{WIDTH}" '
            f'height="{LANE - 2}"/>'
        )
    for number, wave in enumerate(plan.waves):
        for group in wave:
            parts += _group(
                plan,
                group,
                number,
                LEFT + plan.starts[number][group.first] * scale,
                group.us * scale,
            )
    parts += _legend(plan, bottom)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _group(plan: ContextPlan, group: RowGroup, wave: int, x: float, width: float) -> list[str]:
    """The box of a group and in it its documents, in the order of their indices."""
    y, height = TOP + group.first * LANE, group.size * LANE - 2
    told = (
        f"wave {wave}: {len(group.documents)} documents on {group.size} ranks from rank "
        f"{group.first}, bucket of "
        f"{group.bucket.tokens:,} tokens and {group.bucket.documents} documents, "
        f"{group.us / 1000:.2f} ms"
    )
    inner = max(width - 1, 0.5)
    parts = [
        f'<g><title>{told}</title><rect x="{_number(x)}" y="{y}" width="{_number(inner)}" '
        f'height="{height}" '
        f'rx="2" fill="{_colour(plan, group.size, 0.88)}"/></g>'
    ]
    start = x
    for place, document in enumerate(group.documents):
        share = inner * plan.lengths[document] / group.bucket.tokens
        shade = _colour(plan, group.size, 0.66 if place % 2 else 0.73)
        shown = (
            _text(start + share / 2, y + height / 2 + 4, str(document), "block small middle")
            if len(str(document)) * DIGIT < share
            else ""
        )
        parts.append(
            f"<g><title>document {document}: {plan.lengths[document]:,} tokens, {told}</title>"
            f'<rect x="{_number(start)}" y="{y}" width="{_number(share)}" height="{height}" '
            f'fill="{shade}"/>'
            f"{shown}</g>"
        )
        start += share
    return parts


def _ruler(step_us: float, scale: float, bottom: float) -> list[str]:
    """About ten marks of 1, 2 or 5 times a power of ten milliseconds."""
    step = next(
        (
            unit * 10.0**power
            for power in range(-3, 7)
            for unit in (1, 2, 5)
            if unit * 10.0**power * 12 >= step_us / 1000
        ),
        1e7,
    )
    marks = []
    for mark in range(int(step_us / 1000 / step) + 1):
        x = _number(LEFT + mark * step * 1000 * scale)
        marks.append(f'<line class="line" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}"/>')
        marks.append(_text(float(x), TOP - 10, f"{mark * step:g}", "quiet small middle"))
    return marks


def _legend(plan: ContextPlan, top: float) -> list[str]:
    parts = []
    for place, size in enumerate(plan.request.sizes):
        x = 16 + place * 110
        parts.append(
            f'<rect x="{x}" y="{top + 14}" width="20" height="12" '
            f'fill="{_colour(plan, size, 0.7)}"/>'
        )
        parts.append(_text(x + 26, top + 24, f"cp {size}", "text"))
    parts.append(
        _text(
            16,
            top + 46,
            "a box: one row on its ranks, divided by the tokens of its documents (numbers); "
            "pale: padding",
            "quiet",
        )
    )
    return parts


def _colour(plan: ContextPlan, size: int, lightness: float) -> str:
    """One hue per size."""
    hue = (0.56 + plan.request.sizes.index(size) * 5 / 12) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" class="{classes}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
