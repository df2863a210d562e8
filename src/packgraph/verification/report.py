"""The table of `packgraph verify`."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from packgraph.train.config.values import render
from packgraph.verification.compared_run import KINDS, RANKS_KINDS
from packgraph.verification.ranks import OneProcessReport, RanksReport
from packgraph.verification.verify import VerifyReport

EQUAL = "bitwise equal"
LIMITS_EXPLAINED = (
    "Distances are relative. Sums over ranks are rounded in another order than in one process, so "
    "they are not zero; "
    "the limits stand well above what one step rounds in {dtype}. Without dropout; the update is "
    "compared on equal "
    "gradients."
)


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
    _add_sizes(table, report)
    fallbacks = (
        ", ".join(f"{count} {reason}" for reason, count in report.fallbacks.items()) or "none"
    )
    table.add_row("replayed / fallbacks", f"{report.replayed} / {fallbacks}")
    _add_made_again(table, report.made_again)
    console.print(table)
    if not report.shows:
        console.print(
            f"{_how_much(report)} was replayed, so nothing was shown: see the fallbacks above.",
            highlight=False,
        )


def _how_much(report: VerifyReport) -> str:
    return "Hardly anything" if report.replayed else "Nothing"


def ranks_verdict(report: RanksReport, kind: str) -> str:
    """`bitwise equal on every rank`, or the first difference with its rank, and the other ranks
    that have one."""
    found = report.found(kind)
    if not found:
        return f"{EQUAL} on every rank"
    others = ", ".join(str(one.rank) for one in sorted(found[1:], key=lambda one: one.rank))
    return str(found[0]) + (f"; also on rank {others}" if others else "")


def print_ranks_report(report: RanksReport, console: Console) -> None:
    """One table for one verified run over several ranks, and why it counts as failed if it does."""
    first = report.ranks[0]
    table = Table(title=report.title, title_justify="left")
    table.add_column(f"eager against graph on {len(report.ranks)} ranks")
    table.add_column(f"{first.steps} steps, {first.microbatches} microbatches", overflow="fold")
    for kind in RANKS_KINDS:
        table.add_row(kind, ranks_verdict(report, kind))
    _add_sizes(table, first)  # all ranks count all rows of a step
    counted = sum((Counter(rank.fallbacks) for rank in report.ranks), Counter[str]())
    fallbacks = ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"
    table.add_row(
        "replayed / fallbacks", f"{sum(rank.replayed for rank in report.ranks)} / {fallbacks}"
    )
    _add_made_again(table, first.made_again)  # all ranks make a step again together
    if report.one_process is not None:
        _add_one_process(table, report.one_process)
    console.print(table)
    found = report.found()
    if found:
        console.print(
            f"First difference between eager and graph: {found[0].kind}: {found[0]}",
            highlight=False,
        )
    if report.silent_ranks():
        ranks, one = (
            ", ".join(map(str, report.silent_ranks())),
            report.ranks[report.silent_ranks()[0]],
        )
        console.print(
            f"{_how_much(one)} was replayed on rank {ranks}, so nothing was shown there: see the "
            "fallbacks "
            "above.",
            highlight=False,
        )


def _add_sizes(table: Table, report: VerifyReport) -> None:
    """A row for how many rows of which capacity were compared: one that is missing was not."""
    sizes = ", ".join(
        f"{render(capacity)}: {count}" for capacity, count in sorted(report.rows.items())
    )
    table.add_row("sizes of rows", sizes or "none")


def _add_made_again(table: Table, count: int) -> None:
    """A row for steps that lacked room for experts, where there were any."""
    if count:
        table.add_row(
            "made again",
            f"{count} time{'s' * (count > 1)}, with more room for experts (parallel.expert_room)",
        )


def _add_one_process(table: Table, report: OneProcessReport) -> None:
    """The rows that compare the run with one process."""
    table.add_section()
    table.add_row("against one process", f"{report.steps} steps, the largest distances")
    if report.changed:
        table.add_row("updated", report.changed)
    for kind, distance in report.distances.items():
        if distance.size == distance.limit == 0.0:
            table.add_row(kind, EQUAL)
            continue
        place = (
            ""
            if distance.size == 0.0
            else f" (step {distance.step}{', ' * bool(distance.name)}{distance.name})"
        )
        judged = (
            f"{distance.size:.1g} of at most {distance.limit:.0e}"
            if distance.good
            else (f"DIFFERS: {distance.size:.2g}, at most {distance.limit:.0e} is allowed")
        )
        table.add_row(kind, judged + place)
    if not report.steps:
        table.add_row("", "DIFFERS: there was no step to compare")


def print_ranks_total(reports: Sequence[RanksReport], console: Console) -> None:
    """The last line: how many runs were right."""
    good = sum(report.good for report in reports)
    types = sorted(
        {report.one_process.dtype for report in reports if report.one_process is not None}
    )
    if types:
        console.print(LIMITS_EXPLAINED.format(dtype=" and ".join(types)), highlight=False)
    alone = " and, within the limits, those of one process" if types else ""
    console.print(
        f"{good} of {len(reports)} runs bitwise equal on every rank{alone}", highlight=False
    )


def print_total(reports: Sequence[VerifyReport], console: Console) -> None:
    """The last line: how many runs were equal."""
    good = sum(report.good for report in reports)
    console.print(f"{good} of {len(reports)} runs bitwise equal", highlight=False)
