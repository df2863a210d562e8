"""The numbers of a schedule as text: slots per rank and chunk, what they cost, how much of the time
is waiting."""

from packgraph.parallel.pipeline.schedule import Schedule, peak_in_flight
from packgraph.viz.picture import Picture, chunk_name


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
        *_aligned(table),
        "",
        f"steady memory  {_count(most, 'slot')} on the fullest rank, whatever the number of "
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
            f"{_count(picture.buckets.count(bucket), 'microbatch', 'es')}"
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
        f"{kind}: {_count(schedule.ranks, 'rank')}, {_count(schedule.chunks, 'chunk')} each, "
        f"{_count(schedule.microbatches, 'microbatch', 'es')}"
    )


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in table
    ]
