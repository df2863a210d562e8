"""The table of `packgraph verify`."""
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from packgraph.diagnose.verify import KINDS, VerifyReport

EQUAL = "bitwise equal"


def verdict(report: VerifyReport, kind: str) -> str:
    """`bitwise equal`, or where the first difference is."""
    difference = report.differences.get(kind)
    return EQUAL if difference is None else str(difference)


def print_report(report: VerifyReport, console: Console) -> None:
    """One table for one verified run, and why it counts as failed if it does."""
    table = Table(title=report.title, title_justify="left")
    table.add_column("eager against graph")
    table.add_column(f"{report.steps} steps, {report.microbatches} microbatches", overflow="fold")
    for kind in KINDS:
        table.add_row(kind, verdict(report, kind))
    fallbacks = ", ".join(f"{count} {reason}" for reason, count in report.fallbacks.items()) or "none"
    table.add_row("replayed / fallbacks", f"{report.replayed} / {fallbacks}")
    console.print(table)
    if report.replayed == 0:
        console.print("Nothing was replayed, so nothing was shown: see the fallbacks above.", highlight=False)


def print_total(reports: Sequence[VerifyReport], console: Console) -> None:
    """The last line: how many runs were equal."""
    good = sum(report.good for report in reports)
    console.print(f"{good} of {len(reports)} runs bitwise equal", highlight=False)
