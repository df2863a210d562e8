"""The pages of docs: every name they draw exists, every page has a place, and the site builds."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

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


def test_versions_are_the_pinned_ones() -> None:
    """Of the installation's matrix and the citation."""
    pins = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("requirements/*.txt"))
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    assert len(rows) == 7 and all(f"\n{name}=={version}" in pins for name, version in rows)
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {packgraph.__version__}\n" in cited


def test_troubleshooting_knows_every_reason_to_run_eagerly() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [f"| {reason.text} | {reason.remedy} |" for reason in REASONS.values()]
    assert [row for row in rows if row not in page] == []
    assert sum(reason.asked for reason in REASONS.values()) == 6  # as the page says


BUILT = pytest.mark.skipif(
    not (find_spec("mkdocs") and find_spec("mkdocstrings") and find_spec("material")),
    reason="needs the extra `docs`",
)


def test_every_page_has_a_place_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    made = {"index.md", "examples/index.md", "changelog.md", "contributing.md", "security.md"}
    assert set(re.findall(r"[\w/.-]+\.md", text[text.index("\nnav:") :])) == pages | made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """All pages of the site, which builds without a warning."""
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {file: file.read_text(encoding="utf-8") for file in folder.rglob("*.html")}


@BUILT
def test_every_link_of_the_site_answers(site: dict[Path, str]) -> None:
    (root,) = {file.parent for file in site if file.name == "404.html"}
    anchors = {file: {"", *re.findall(r'\bid="([^"]+)"', text)} for file, text in site.items()}
    dead, followed = [], 0
    for file, text in site.items():
        for link in re.findall(r'<[^>]*?\s(?:href|src)="([^"]*)"', text):
            path, _, anchor = unquote(unescape(link)).partition("#")
            if re.match(r"\w+:|//", path):
                continue
            target = root / path[1:] if path.startswith("/") else file.parent / path
            target = (target / "index.html" if target.is_dir() else target).resolve()
            target, followed = target if path else file, followed + 1
            if not target.exists() or anchor not in anchors.get(target, {""}):
                dead.append(f"{file.relative_to(root)}: {link}")
    assert not dead and followed > 5000
    assert {root / f"{name}/index.html" for name in ("changelog", "examples/dpo")} <= set(site)


@BUILT
def test_examples_of_the_site_are_code(site: dict[Path, str]) -> None:
    """No prompt, fence or link of Markdown is left in the prose, and every example is a block."""
    for file, text in site.items():
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.findall(r"&gt;&gt;&gt;|```|\]\([^)\s]+\)", prose), file
    blocks = re.findall(r"Examples:</span></p>\s*<div class=\"(.*?)\"", "".join(site.values()))
    assert len(blocks) > 30 and all("highlight" in block for block in blocks)


@BUILT
def test_the_tutorial_is_a_notebook_too(site: dict[Path, str]) -> None:
    (folder,) = [file.parent for file in site if file.parent.name == "tutorial"]
    notebook = json.loads((folder.parent / "tutorial.ipynb").read_text(encoding="utf-8"))
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(
        f"```python\n{cell}\n```" in (DOCS / "tutorial.md").read_text(encoding="utf-8")
        for cell in code
    )
