"""The pages of docs: every name they draw exists, every page has a place, and the site builds."""

import importlib
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import packgraph
from packgraph.graphs.fallback import REASONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DRAWN = [
    drawn
    for page in sorted((DOCS / "concepts").glob("*.md"))
    for drawn in re.findall(
        r"─ ([\w.]+) +((?:graphs|train)/[\w/]+\.py)", page.read_text(encoding="utf-8")
    )
]


@pytest.mark.parametrize(("name", "file"), DRAWN)
def test_what_is_drawn_exists_where_it_is_drawn(name: str, file: str) -> None:
    module = importlib.import_module("packgraph." + file.removesuffix(".py").replace("/", "."))
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    assert inspect.getmodule(found) is module


def test_there_is_something_drawn() -> None:
    assert len(DRAWN) > 40


def test_the_page_draws_every_file_of_a_replay() -> None:
    """Counted by `sys.setprofile`, in a process of its own: benchmarks/hops.py."""
    command = [sys.executable, str(ROOT / "benchmarks" / "hops.py"), "--calls"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    capture, replay = done.stdout.split("replay: ")
    passed = set(re.findall(r"^ +\d+ (\S+)", replay, re.MULTILINE))
    page = (DOCS / "concepts" / "replay.md").read_text(encoding="utf-8").split("## A capture")[0]
    assert passed == {*re.findall(r"graphs/[\w/]+\.py", page), "graphs/recorder/backend.py"}
    assert int(replay.split()[0]) <= 95, "calls of a replay"
    assert int(re.findall(r"(\d+) files", capture)[0]) <= 40


def test_the_reference_has_all_public_names_once() -> None:
    page = (DOCS / "reference" / "packgraph.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: packgraph\.(\w+)$", page, re.MULTILINE)) == sorted(
        packgraph.__all__
    )


def test_troubleshooting_knows_every_reason_to_run_eagerly() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [f"| {reason.text} | {reason.remedy} |" for reason in REASONS.values()]
    assert [row for row in rows if row not in page] == []
    assert sum(reason.asked for reason in REASONS.values()) == 6  # as the page says


def test_every_page_has_a_place_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(re.findall(r"[\w/.-]+\.md", text[text.index("\nnav:") :])) == {*pages, "index.md"}


@pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings") and find_spec("material")),
    reason="needs what packgraph[docs] installs",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "packgraph" / "index.html").exists()
