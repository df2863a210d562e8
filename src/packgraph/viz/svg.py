"""A schedule as SVG: one lane per rank and chunk, colours by microbatch, readable on light and dark
pages.

A forward is pale, its backward of the same hue and stronger. The file needs no font, script or
other file; the colours of page and writing follow the reader's theme, those of blocks are mid tones
with dark writing on either.
"""

import colorsys
from html import escape

from packgraph.viz.picture import DrawnAction, Picture, chunk_name

UNIT, LANE, GAP, LEFT, TOP = 30, 32, 14, 84, 76
HUES = 12
STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e }
  .lane { fill: #eff2f5 } .line { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .lane { fill: #1b2129 } .line { stroke: #3d444d }
  }
  text { font: 12px ui-sans-serif, system-ui, sans-serif } .small { font-size: 10px } .block { fill: #14181d }
  .middle { text-anchor: middle } .end { text-anchor: end } .title { font-weight: 600; font-size: 14px }"""  # noqa: E501


def draw_svg(picture: Picture, title: str) -> str:
    """The whole drawing as the text of an SVG file."""
    schedule, timeline = picture.schedule, picture.timeline
    rank_height = schedule.chunks * LANE + GAP
    bottom = TOP + schedule.ranks * rank_height
    width = max(LEFT + round(timeline.makespan * UNIT) + 24, 640)
    # The legend has a line for what the marks mean, one for the microbatches and, if need be, one
    # for the buckets.
    height = bottom + (3 if picture.buckets else 2) * 24
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
            f"bubble {timeline.bubble_share:.1%}, time in forwards of the smallest microbatch",
            "quiet",
        ),
        *_ruler(timeline.makespan, bottom),
    ]
    for rank, row in enumerate(picture.rows):
        top = TOP + rank * rank_height
        parts.append(_text(16, top + schedule.chunks * LANE / 2 + 4, f"rank {rank}", "text"))
        for chunk in range(schedule.chunks):
            lane = top + chunk * LANE
            parts.append(
                f'<rect class="lane" x="{LEFT}" y="{lane}" '
                f'width="{_number(timeline.makespan * UNIT)}" '
                f'height="{LANE - 2}" rx="3"/>'
            )
            parts.append(_text(LEFT - 8, lane + LANE / 2 + 3, chunk_name(chunk), "quiet end"))
        parts += [_block(block, top + block.chunk * LANE, picture) for block in row]
    parts += _legend(picture, bottom)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _block(block: DrawnAction, top: float, picture: Picture) -> str:
    """A rectangle with the action and, below it, slot and bucket; more of it in the tooltip."""
    x, width = LEFT + block.start * UNIT, (block.end - block.start) * UNIT
    below = str(block.slot) if block.bucket is None else f"{block.slot}·{block.bucket}"
    told = (
        f"{'forward' if block.action.kind == 'F' else 'backward'} of microbatch "
        f"{block.action.microbatch}, stage "
        f"{block.action.stage}, slot {block.slot_name}"
    )
    if block.bucket is not None:
        told += f", bucket {block.bucket} ({picture.capacities[block.bucket]:,} tokens)"
    colour = _colour(block.action.microbatch, block.action.kind == "B")
    return (
        f'<g><title>{told}</title><rect x="{_number(x + 0.5)}" y="{_number(top)}" '
        f'width="{_number(width - 1)}" '
        f'height="{LANE - 2}" rx="3" fill="{colour}"/>'
        + _text(x + width / 2, top + 13, block.label, "block middle")
        + _text(x + width / 2, top + 25, below, "block small middle")
        + "</g>"
    )


def _ruler(makespan: float, bottom: float) -> list[str]:
    step = 5 if makespan <= 200 else 20
    marks = []
    for time in range(0, int(makespan) + 1, step):
        x = LEFT + time * UNIT
        marks.append(f'<line class="line" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom - GAP}"/>')
        marks.append(_text(x, TOP - 10, str(time), "quiet small middle"))
    return marks


def _legend(picture: Picture, top: float) -> list[str]:
    buckets, slot = picture.buckets, picture.rows[0][0].slot
    example = f"{slot}·{buckets[0]}" if buckets else str(slot)
    parts = [
        _text(
            16,
            top + 12,
            f"F, B: forward and backward of a microbatch; below it, {example}: its slot"
            + (" · its bucket" if buckets else "")
            + "; lanes a, b, ...: chunks of the rank",
            "quiet",
        )
    ]
    shown = min(picture.schedule.microbatches, HUES)
    for microbatch in range(shown):
        x = 16 + microbatch * 46
        parts.append(
            f'<rect x="{x}" y="{top + 24}" width="10" height="12" '
            f'fill="{_colour(microbatch, False)}"/>'
            f'<rect x="{x + 10}" y="{top + 24}" width="10" height="12" '
            f'fill="{_colour(microbatch, True)}"/>'
        )
        parts.append(_text(x + 25, top + 34, str(microbatch), "text"))
    if shown < picture.schedule.microbatches:
        parts.append(_text(16 + shown * 46, top + 34, "... colours repeat", "quiet"))
    if buckets:
        named = ", ".join(
            f"{bucket}: {tokens:,} tokens" for bucket, tokens in enumerate(picture.capacities)
        )
        parts.append(_text(16, top + 56, f"buckets {named}", "quiet"))
    return parts


def _colour(microbatch: int, backward: bool) -> str:
    """Neighbours differ much: the hue moves by five twelfths of the circle."""
    hue = (0.56 + microbatch * 5 / HUES) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, 0.66 if backward else 0.84, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text x="{_number(x)}" y="{_number(y)}" class="{classes}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
