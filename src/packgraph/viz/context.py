"""A plan of dynamic context parallelism as text and as SVG.

As text a line per rank with time to the right, and a table of its groups:

    rank 0  4:3,17,40────── 2:5,9─── 1:8──
    rank 1  4:3,17,40────── 2:5,9─── 1:11─

c:documents is a group of c ranks and what is in its row. Every rank of a group shows it.

As SVG (`draw_context_svg`) a lane per rank, time to the right, groups across their ranks' lanes. A
group is a box over the lanes of its ranks. Its documents divide it in proportion to their tokens,
and what stays pale is padding. Colours tell the size of the group.
"""

from typing import Any

from packgraph.parallel.context.plan import ContextPlan, RowGroup
from packgraph.viz.drawing import Block, colour, draw_lanes

MOST_LINES = 60  # of the table; an SVG and JSON have all
WIDTH = 1100
DIGIT = 7  # pixels of a character


def describe_context(plan: ContextPlan, width: int = 120) -> str:
    """Picture, table and figures for people, in lines of at most `width` columns."""
    return "\n".join([*_picture(plan, width), "", *_table(plan, width), "", *_figures(plan)]) + "\n"


def context_values(plan: ContextPlan) -> dict[str, Any]:
    """The plan as JSON-able values: indices of documents, tokens, microseconds, and shares between
    0 and 1."""
    microsteps = [
        [
            {
                "ranks": list(group.ranks),
                "documents": list(group.documents),
                "tokens": _tokens(plan, group),
                "bucket": [group.bucket.tokens, group.bucket.documents],
                "us": group.us,
            }
            for group in microstep
        ]
        for microstep in plan.microsteps
    ]
    return {
        "world": plan.request.world,
        "tokens_per_rank": plan.request.tokens,
        "sizes": list(plan.request.sizes),
        "documents": len(plan.lengths) - len(plan.left),
        "tokens": plan.tokens,
        "left": list(plan.left),
        "step_us": plan.step_us,
        "barrier_us": plan.barrier_us,
        "bound_us": plan.bound.step_us,
        "balance": plan.balance,
        "padding": plan.padding,
        "rank_us": list(plan.rank_us),
        "buckets": [[size, bucket.tokens, bucket.documents] for size, bucket in plan.buckets],
        "waves": microsteps,
    }


def _picture(plan: ContextPlan, width: int) -> list[str]:
    margin = len(f"rank {plan.request.world - 1}") + 2
    scale = (width - margin) / max(plan.step_us, 1e-9)
    lines = []
    for rank in range(plan.request.world):
        line = f"rank {rank}".ljust(margin)
        for index, wave_starts in enumerate(plan.starts):
            group = plan.group_of(index, rank)
            start, end = (
                margin + round(time * scale)
                for time in (wave_starts[rank], wave_starts[rank] + group.us)
            )
            line = line.ljust(start) + _cell(group, end - start - 1)
        lines.append(line.rstrip())
    return lines


def _cell(group: RowGroup, room: int) -> str:
    """The name of a group in `room` columns, drawn on to its end."""
    if room < 1:
        return ""
    name = (
        f"{group.size}:{','.join(map(str, group.documents))}"
        if group.documents
        else f"{group.size}:"
    )
    return (
        name[: room - 1] + "…"
        if len(name) > room
        else name.ljust(room, "─" if group.documents else "·")
    )


def _table(plan: ContextPlan, width: int) -> list[str]:
    table = [("microstep", "ranks", "cp", "bucket", "filled", "ms")]
    named = ["documents (tokens)"]
    for index, microstep in enumerate(plan.microsteps):
        for group in microstep:
            ranks = (
                f"{group.first}-{group.first + group.size - 1}"
                if group.size > 1
                else str(group.first)
            )
            table.append(
                (
                    str(index),
                    ranks,
                    str(group.size),
                    f"{group.bucket.tokens}x{group.bucket.documents}",
                    f"{_tokens(plan, group) / group.bucket.tokens:.1%}",
                    f"{group.us / 1000:.2f}",
                )
            )
            named.append(
                ", ".join(
                    f"{document} ({plan.lengths[document]:,})" for document in group.documents
                )
                or "-"
            )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join([*(cell.rjust(size) for cell, size in zip(row, widths)), text])
        for row, text in zip(table, named)
    ]
    lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    if len(lines) > MOST_LINES:
        lines = [
            *lines[:MOST_LINES],
            f"... {len(lines) - MOST_LINES} more groups; --json or an SVG shows them",
        ]
    return lines


def _figures(plan: ContextPlan) -> list[str]:
    """Returns figures of the plan, one line each."""
    request, placed = plan.request, len(plan.lengths) - len(plan.left)
    groups = [group for microstep in plan.microsteps for group in microstep]
    shared = ", ".join(
        f"{sum(group.size == size for group in groups)} of {size}" for size in request.sizes
    )
    left = f"; {len(plan.left):,} wait for the next step" if plan.left else ""
    busiest, idlest = max(plan.rank_us, default=0.0), min(plan.rank_us, default=0.0)
    return [
        f"step      {plan.step_us / 1000:.1f} ms predicted; {plan.barrier_us / 1000:.1f} ms if all "
        "ranks waited after "
        "every microstep",
        f"balance   {plan.balance:.1%} of the lower bound of {plan.bound.step_us / 1000:.1f} ms; "
        "ranks work "
        f"{idlest / 1000:.1f} to {busiest / 1000:.1f} ms",
        f"groups    {shared} ranks, in {len(plan.microsteps)} microsteps (microbatches of every "
        f"rank), at least {plan.bound.microsteps}",
        f"padding   {plan.padding:.2%} of the places for {request.world} x {request.tokens:,} "
        "tokens a microstep",
        f"documents {placed:,} of {plan.tokens:,} tokens have a place{left}",
        "variants  "
        + (
            ", ".join(
                f"cp{size} {bucket.tokens}x{bucket.documents}" for size, bucket in plan.buckets
            )
            or "none"
        ),
    ]


def _tokens(plan: ContextPlan, group: RowGroup) -> int:
    return sum(plan.lengths[document] for document in group.documents)


def draw_context_svg(plan: ContextPlan, title: str) -> str:
    """The whole drawing as the text of an SVG file."""
    return draw_lanes(
        title,
        f"{plan.step_us / 1000:.1f} ms predicted, {plan.balance:.1%} of the lower bound; padding "
        f"{plan.padding:.2%}; time in ms",
        [f"rank {rank}" for rank in range(plan.request.world)],
        [
            block
            for index, microstep in enumerate(plan.microsteps)
            for group in microstep
            for block in _blocks(plan, group, index)
        ],
        plan.step_us,
        width=WIDTH,
        unit=1000,
        legend=[(f"cp {size}", _colour(plan, size, 0.7)) for size in plan.request.sizes],
        note="a box: one row on its ranks, divided by the tokens of its documents (numbers); "
        "pale: padding",
    )


def _blocks(plan: ContextPlan, group: RowGroup, microstep: int) -> list[Block]:
    """The box of a group and on it its documents, in the order of their indices."""
    told = (
        f"microstep {microstep}: {len(group.documents)} documents on {group.size} ranks from rank "
        f"{group.first}, bucket of {group.bucket.tokens:,} tokens and {group.bucket.documents} "
        f"documents, {group.us / 1000:.2f} ms"
    )
    start = plan.starts[microstep][group.first]
    pale = _colour(plan, group.size, 0.88)
    blocks = [Block(group.first, start, start + group.us, pale, told, lanes=group.size)]
    for place, document in enumerate(group.documents):
        share = group.us * plan.lengths[document] / group.bucket.tokens
        room = share / max(plan.step_us, 1e-9) * WIDTH
        blocks.append(
            Block(
                group.first,
                start,
                start + share,
                _colour(plan, group.size, 0.66 if place % 2 else 0.73),
                f"document {document}: {plan.lengths[document]:,} tokens, {told}",
                str(document) if len(str(document)) * DIGIT < room else "",
                lanes=group.size,
            )
        )
        start += share
    return blocks


def _colour(plan: ContextPlan, size: int, lightness: float) -> str:
    """One hue per size."""
    return colour(0.56 + plan.request.sizes.index(size) * 5 / 12, lightness)
