"""Tables as text."""

from collections.abc import Sequence


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
