"""The page about what graphs assume says what the checks do."""

from pathlib import Path

from packgraph.graphs.checks.assumptions import page
from packgraph.graphs.checks.state_kinds import WATCHED
from packgraph.graphs.fallback import REASONS

PAGE = Path(__file__).parents[3] / "docs" / "assumptions.md"


def test_the_page_is_made_of_the_tables():
    assert PAGE.read_text() == page(), (
        "python -m packgraph.graphs.checks.assumptions > docs/assumptions.md"
    )


def test_every_reason_and_every_kind_stands_in_it():
    shown = page()
    assert all(reason.text in shown and reason.remedy for reason in REASONS.values())
    assert all(row.what in shown and row.reason in shown for row in WATCHED)
