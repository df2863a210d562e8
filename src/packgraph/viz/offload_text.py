"""Offloading as a table, one line per rank."""

from collections.abc import Sequence

from packgraph.graphs.memory.budget import shown
from packgraph.viz.offload_picture import OffloadFigures
from packgraph.viz.tables import aligned

HEADER = (
    "",
    "groups",
    "moved",
    "of kept",
    "peak",
    "without",
    "hidden",
    "exposed",
    "lost",
    "to host",
    "to device",
)


def offload_table(figures: Sequence[tuple[str, OffloadFigures]]) -> str:
    """figures: of every rank, or of every chunk of it, with its name. At most 120 columns for short
    ones; ends with a newline."""
    table = [list(HEADER)]
    for name, row in figures:
        table.append(
            [
                name,
                f"{row.moved} of {row.groups}",
                shown(row.copied),
                f"{row.share:.0%}",
                shown(row.peak_bytes),
                shown(row.kept_peak_bytes),
                f"{row.hidden_us / 1000:.2f} ms",
                f"{row.exposed_us / 1000:.2f} ms",
                f"{row.lost:.2%}",
                _speed(row.copied, row.host_us),
                _speed(row.copied, row.device_us),
            ]
        )
    return (
        "\n".join(
            [
                *aligned(table),
                "moved, hidden, exposed: per microbatch; of kept: of what groups keep; lost: "
                "exposed over compute; peak: all in flight",
            ]
        )
        + "\n"
    )


def _speed(nbytes: int, us: float) -> str:
    return f"{nbytes / us / 1000:.1f} GB/s" if us > 0 else "-"
