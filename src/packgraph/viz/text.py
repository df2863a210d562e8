"""A schedule as text: time runs to the right, one column per piece of time, in panels that fit the
page.

    rank 0  F0 F1       B0    F2 B1
      slot  a0 a1       a0    a0 a1

Nothing is shortened unless there are more panels than `most_panels`; then the middle is left out
and the text says so.
"""

from collections.abc import Sequence

from packgraph.viz.picture import DrawnAction, Picture

KEY = "F3, B3: forward, backward of microbatch 3. slot b0: slot 0 of chunk b."


def draw_text(picture: Picture, width: int = 120, most_panels: int = 6) -> str:
    """Lines of at most `width` columns (but never narrower than one block), ended by a newline."""
    blocks = [block for row in picture.rows for block in row]
    label = max(max(len(block.label), len(block.slot_name)) for block in blocks)
    # The shortest forward (1 unit of time) has room for its label and a space.
    scale = label + 1
    margin = (
        max(len(f"rank {picture.schedule.ranks - 1}"), len("bucket") if picture.buckets else 0) + 2
    )
    columns = max((width - margin) // scale, 1) * scale
    total = max(_columns(block, scale)[1] for block in blocks)
    starts, half = list(range(0, total, columns)), max(most_panels // 2, 1)
    lines = [KEY + (" bucket: which capacity it was packed for." if picture.buckets else "")]
    for index, start in enumerate(starts):
        if len(starts) > most_panels and half <= index < len(starts) - half:
            if index == half:
                lines.append(
                    f"\n... {len(starts) - 2 * half} of {len(starts)} panels are left out to be "
                    "short; an SVG "
                    "shows all of it"
                )
            continue
        lines += _panel(picture, start, columns, scale, margin, alone=len(starts) == 1)
    return "\n".join(lines) + "\n"


def _panel(
    picture: Picture, start: int, columns: int, scale: int, margin: int, alone: bool
) -> list[str]:
    lines = ["" if alone else f"\ntime {start // scale} to {(start + columns) // scale}"]
    for rank, row in enumerate(picture.rows):
        visible = [(block, *_columns(block, scale)) for block in row]
        visible = [
            (block, max(left - start, 0), min(right - start, columns))
            for block, left, right in visible
            if left < start + columns and right > start
        ]
        lines.append(
            _line(
                f"rank {rank}", margin, [(b.label, left, right) for b, left, right in visible], "─"
            )
        )
        lines.append(
            _line("slot", margin, [(b.slot_name, left, right) for b, left, right in visible], " ")
        )
        if picture.buckets:
            lines.append(
                _line(
                    "bucket",
                    margin,
                    [(str(b.bucket), left, right) for b, left, right in visible],
                    " ",
                )
            )
    return lines


def _columns(block: DrawnAction, scale: int) -> tuple[int, int]:
    return round(block.start * scale), round(block.end * scale)


def _line(name: str, margin: int, cells: Sequence[tuple[str, int, int]], filling: str) -> str:
    """One line of a panel: texts from `left` on, filled up to one column before `right`."""
    line = name.rjust(margin - 2) + "  "
    for text, left, right in cells:
        line = line.ljust(margin + left)
        room = right - left
        if len(text) > room:
            line += filling * (room - 1)
        else:
            # One column of filling after a label would only be noise.
            line += text.ljust(room - 1, filling) if room > len(text) + 2 else text
    return line.rstrip()
