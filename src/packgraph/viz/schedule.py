"""A pipeline schedule drawn: as text, as SVG, and its numbers.

`make_picture` says who runs what when, in which slot and bucket, before it is text or SVG. Chunks
are named by letters and slots by their chunk's letter and a number: b0 is slot 0 of chunk b.

As text (`draw_text`) time runs to the right, one column per piece of time, in panels that fit the
page:

    rank 0  F0 F1       B0    F2 B1
      slot  a0 a1       a0    a0 a1

Nothing is shortened unless there are more panels than `most_panels`; then the middle is left out
and the text says so.

As SVG (`draw_svg`) there is one lane per rank and chunk, with colours by microbatch: a forward is
pale, its backward of the same hue and stronger. `summarize` tells slots per rank and chunk, what
they cost, and how much of the time is waiting.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass

from packgraph.parallel.pipeline.schedule import (
    Action,
    Schedule,
    Timeline,
    assign_slots,
    peak_in_flight,
    simulate,
)
from packgraph.viz.drawing import Block, aligned, colour, counted, draw_lanes

KEY = "F3, B3: forward, backward of microbatch 3. slot b0: slot 0 of chunk b."
UNIT = 30  # pixels of a forward
HUES = 12


@dataclass(frozen=True)
class DrawnAction:
    """One action in a drawing. `bucket` is an index of the picture's capacities, None when there
    are none."""

    action: Action
    chunk: int
    slot: int
    bucket: int | None
    start: float
    end: float

    @property
    def label(self) -> str:
        """F3: the forward of microbatch 3."""
        return f"{self.action.kind}{self.action.microbatch}"

    @property
    def slot_name(self) -> str:
        """b0: slot 0 of chunk b."""
        return f"{chunk_name(self.chunk)}{self.slot}"


@dataclass(frozen=True)
class Picture:
    """Blocks per rank in order of time. capacities: tokens per bucket. Times are in forwards of the
    smallest bucket."""

    schedule: Schedule
    timeline: Timeline
    rows: tuple[tuple[DrawnAction, ...], ...]
    capacities: tuple[int, ...]
    buckets: tuple[int, ...]


def chunk_name(chunk: int) -> str:
    """a, b, c, ...; numbers in dots beyond the alphabet."""
    return string.ascii_lowercase[chunk] if chunk < len(string.ascii_lowercase) else f".{chunk}."


def picture_errors(
    microbatches: int, capacities: Sequence[int], buckets: Sequence[int]
) -> list[str]:
    """Every reason why these buckets do not fit the schedule; empty when they do."""
    errors = [
        f"a capacity must have at least 1 token, got {tokens}"
        for tokens in capacities
        if tokens < 1
    ]
    if buckets and not capacities:
        errors.append("buckets are indices of capacities: say which capacities there are")
    if buckets and len(buckets) != microbatches:
        errors.append(
            f"there must be one bucket per microbatch: {microbatches} microbatches, "
            f"{len(buckets)} buckets"
        )
    if capacities:
        errors += [
            f"microbatch {microbatch}: there is no bucket {bucket}, only 0 to {len(capacities) - 1}"
            for microbatch, bucket in enumerate(buckets)
            if not 0 <= bucket < len(capacities)
        ]
    return errors


def make_picture(
    schedule: Schedule, capacities: Sequence[int] = (), buckets: Sequence[int] = ()
) -> Picture:
    """Simulate `schedule` and name the slots. A backward is drawn twice as long as its forward,
    either in proportion to the tokens of the bucket.

    capacities: tokens per bucket. buckets: one index of them per microbatch, default the largest
    for all; they fit the schedule (see `picture_errors`). Raises ValueError with all reasons when
    the schedule cannot run.
    """
    if capacities and not buckets:
        buckets = [list(capacities).index(max(capacities))] * schedule.microbatches
    smallest = min((capacities[bucket] for bucket in buckets), default=1)
    timeline = simulate(
        schedule, microbatch_costs=[capacities[bucket] / smallest for bucket in buckets] or None
    )
    slots = assign_slots(schedule)
    rows = tuple(
        tuple(
            DrawnAction(
                action,
                schedule.chunk_of(action.stage),
                slots[(rank, action.stage, action.microbatch)],
                buckets[action.microbatch] if buckets else None,
                start,
                end,
            )
            for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank])
        )
        for rank, row in enumerate(schedule.rows)
    )
    return Picture(schedule, timeline, rows, tuple(capacities), tuple(buckets))


def summarize(picture: Picture, slots: tuple[tuple[int, ...], ...]) -> str:
    """A table of `slots` ([rank][chunk], as `slot_counts` gives them), bubble and steady memory,
    for people."""
    schedule, largest = picture.schedule, max(picture.capacities, default=0)
    used = [sum(row) for row in peak_in_flight(schedule)]
    header = [
        "slots",
        *(f"chunk {chunk_name(chunk)}" for chunk in range(schedule.chunks)),
        "all",
        "used here",
    ]
    header += ["tokens kept"] if largest else []
    table = [header]
    for rank, row in enumerate(slots):
        cells = [f"rank {rank}", *map(str, row), str(sum(row)), str(used[rank])]
        table.append(cells + ([f"{sum(row) * largest:,}"] if largest else []))
    most, every = max(map(sum, slots)), schedule.chunks * schedule.microbatches
    lines = [
        *aligned(table),
        "",
        f"steady memory  {counted(most, 'slot')} on the fullest rank, whatever the number of "
        "microbatches",
        "               "
        + (f"= activations of {most * largest:,} tokens in one chunk; " if largest else "")
        + (
            f"one slot per microbatch and chunk would be {every} here"
            if every > most
            else f"these microbatches use {max(used)}"
        ),
        f"bubble         {picture.timeline.bubble_share:.1%} of the ranks' time is waiting"
        f" (a backward counts as two forwards{', both by their tokens' if largest else ''})",
    ]
    if picture.buckets:
        lines += [
            f"{'buckets' if bucket == 0 else '':13}  {bucket}: {tokens:,} tokens, "
            f"{counted(picture.buckets.count(bucket), 'microbatch', 'es')}"
            for bucket, tokens in enumerate(picture.capacities)
        ]
    return "\n".join(lines) + "\n"


def title(schedule: Schedule, group: int | None) -> str:
    """One line that says which schedule this is."""
    kind = (
        "1F1B"
        if schedule.chunks == 1
        else f"interleaved 1F1B in groups of {group or schedule.ranks}"
    )
    return (
        f"{kind}: {counted(schedule.ranks, 'rank')}, {counted(schedule.chunks, 'chunk')} each, "
        f"{counted(schedule.microbatches, 'microbatch', 'es')}"
    )


def draw_text(picture: Picture, width: int = 120, most_panels: int = 6) -> str:
    """Lines of at most `width` columns (but never narrower than one block), ended by a newline."""
    blocks = [block for row in picture.rows for block in row]
    label = max(max(len(block.label), len(block.slot_name)) for block in blocks)
    # The shortest forward (1 unit of time) has room for its label and a space.
    scale = label + 1
    names = f"rank {picture.schedule.ranks - 1}", "bucket" * bool(picture.buckets)
    margin = max(map(len, names)) + 2
    columns = max((width - margin) // scale, 1) * scale
    total = max(round(block.end * scale) for block in blocks)
    starts, half = list(range(0, total, columns)), max(most_panels // 2, 1)
    lines = [KEY + (" bucket: which capacity it was packed for." if picture.buckets else "")]
    for index, start in enumerate(starts):
        if len(starts) > most_panels and half <= index < len(starts) - half:
            if index == half:
                lines.append(
                    f"\n... {len(starts) - 2 * half} of {len(starts)} panels are left out to be "
                    "short; an SVG shows all of it"
                )
            continue
        lines += _panel(picture, start, columns, scale, margin, alone=len(starts) == 1)
    return "\n".join(lines) + "\n"


def _panel(
    picture: Picture, start: int, columns: int, scale: int, margin: int, alone: bool
) -> list[str]:
    lines = ["" if alone else f"\ntime {start // scale} to {(start + columns) // scale}"]
    for rank, row in enumerate(picture.rows):
        places = [(round(block.start * scale), round(block.end * scale)) for block in row]
        visible = [
            (block, max(left - start, 0), min(right - start, columns))
            for block, (left, right) in zip(row, places)
            if left < start + columns and right > start
        ]
        labels = [(b.label, left, right) for b, left, right in visible]
        slots = [(b.slot_name, left, right) for b, left, right in visible]
        lines += [_line(f"rank {rank}", margin, labels, "─"), _line("slot", margin, slots, " ")]
        if picture.buckets:
            buckets = [(str(b.bucket), left, right) for b, left, right in visible]
            lines.append(_line("bucket", margin, buckets, " "))
    return lines


def _line(name: str, margin: int, cells: Sequence[tuple[str, int, int]], filling: str) -> str:
    """One line of a panel: texts from `left` on, filled up to one column before `right`."""
    line = name.rjust(margin - 2) + "  "
    for words, left, right in cells:
        line = line.ljust(margin + left)
        room = right - left
        if len(words) > room:
            line += filling * (room - 1)
        else:
            # One column of filling after a label would only be noise.
            line += words.ljust(room - 1, filling) if room > len(words) + 2 else words
    return line.rstrip()


def draw_svg(picture: Picture, title: str) -> str:
    """The whole drawing as the text of an SVG file."""
    schedule, timeline, buckets = picture.schedule, picture.timeline, picture.buckets
    lanes = [
        f"rank {rank} {chunk_name(chunk)}"
        for rank in range(schedule.ranks)
        for chunk in range(schedule.chunks)
    ]
    note = (
        "F, B: forward and backward of a microbatch, by colour; below it: its slot"
        f"{' · its bucket' if buckets else ''}; lanes a, b, ...: chunks of the rank"
    )
    if buckets:
        sizes = (f"{bucket}: {tokens:,} tokens" for bucket, tokens in enumerate(picture.capacities))
        note += f"; buckets {', '.join(sizes)}"
    return draw_lanes(
        title,
        f"bubble {timeline.bubble_share:.1%}, time in forwards of the smallest microbatch",
        lanes,
        [
            _block(block, rank * schedule.chunks + block.chunk, picture)
            for rank, row in enumerate(picture.rows)
            for block in row
        ],
        timeline.makespan,
        width=timeline.makespan * UNIT,
        note=note,
    )


def _block(block: DrawnAction, lane: int, picture: Picture) -> Block:
    """A box with the action and, below it, slot and bucket; more of it in the tooltip."""
    action = block.action
    told = (
        f"{'forward' if action.kind == 'F' else 'backward'} of microbatch {action.microbatch}, "
        f"stage {action.stage}, slot {block.slot_name}"
    )
    if block.bucket is not None:
        told += f", bucket {block.bucket} ({picture.capacities[block.bucket]:,} tokens)"
    below = str(block.slot) if block.bucket is None else f"{block.slot}·{block.bucket}"
    shade = _colour(action.microbatch, action.kind == "B")
    return Block(lane, block.start, block.end, shade, told, block.label, below)


def _colour(microbatch: int, backward: bool) -> str:
    """Neighbours differ much: the hue moves by five twelfths of the circle."""
    return colour(0.56 + microbatch * 5 / HUES, 0.66 if backward else 0.84, 0.62)
