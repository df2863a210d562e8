"""Parts that drawings share: page, text, numbers and a ruler of SVG files, and tables as text.

An SVG file needs no font, script or other file. The colours of page and writing follow the reader's
theme, those of blocks are mid tones with dark writing on either.
"""

from collections.abc import Sequence
from html import escape

STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e }
  .lane { fill: #eff2f5 } .line { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .lane { fill: #1b2129 } .line { stroke: #3d444d }
  }
  text { font: 12px ui-sans-serif, system-ui, sans-serif } .small { font-size: 10px } .block { fill: #14181d }
  .middle { text-anchor: middle } .end { text-anchor: end } .title { font-weight: 600; font-size: 14px }"""  # noqa: E501  # noqa: E501


def page(width: int, height: int, title: str, subtitle: str) -> list[str]:
    """The opening of the file: page, title and a quiet line below it. `</svg>` is left to whoever
    draws on."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}\n</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        text(16, 26, title, "text title"),
        text(16, 46, subtitle, "quiet"),
    ]


def text(x: float, y: float, words: str, classes: str) -> str:
    """Words at a place; classes are those of the style."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{classes}">{escape(words)}</text>'


def number(value: float) -> str:
    """At most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def ruler(span_us: float, left: float, width: float, top: float, bottom: float) -> list[str]:
    """About ten lines from `top` to `bottom` at 1, 2 or 5 times a power of ten milliseconds, named
    above."""
    ms = span_us / 1000
    step = next(
        (
            unit * 10.0**power
            for power in range(-4, 7)
            for unit in (1, 2, 5)
            if unit * 10.0**power * 12 >= ms
        ),
        1e7,
    )
    marks = []
    for mark in range(int(ms / step) + 1 if ms > 0 else 1):
        x = left + (mark * step / ms * width if ms > 0 else 0)
        marks.append(
            f'<line class="line" x1="{number(x)}" x2="{number(x)}" y1="{number(top)}" '
            f'y2="{number(bottom)}"/>'
        )
        marks.append(text(x, top - 4, f"{mark * step:g}", "quiet small middle"))
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
