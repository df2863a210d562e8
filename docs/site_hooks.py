"""Makes pages of README, CHANGELOG and their like, and of examples; a notebook of the tutorial.

The files keep the links that work in the repository; `on_page_markdown` turns those that lead to
such a file into links to its page.
"""

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
EXAMPLES = {
    f"examples/{path.name}": f"examples/{path.stem}.md"
    for path in sorted(Path("examples").iterdir())
    if path.suffix in (".py", ".toml")
}
SHOWN = PAGES | EXAMPLES | {"examples": "examples/index.md"}
SOURCES = {page: source for source, page in SHOWN.items()}
LINK = re.compile(r"(?<=\]\()(?!https?:)[^)#\s]+")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        content = Path(source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    listed = ["# Examples", "", "| program | what it shows |", "|---|---|"]
    for source, page in EXAMPLES.items():
        path = Path(source)
        code = path.read_text(encoding="utf-8")
        says, language = _first_line(code, path.suffix), path.suffix[1:].replace("py", "python")
        text = f"# {path.name}\n\n{says}\n\n```{language}\n{code}```\n"
        files.append(File.generated(config, page, content=text))
        listed.append(f"| [{path.name}]({path.stem}.md) | {says} |")
    files.append(File.generated(config, "examples/index.md", content="\n".join(listed) + "\n"))
    tutorial = Path("docs/tutorial.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "tutorial.ipynb", content=notebook(tutorial)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")

    def shown(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[0]))
        if path not in SHOWN and (place not in SOURCES or not path.startswith("docs/")):
            return found[0]
        target = SHOWN.get(path, path.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(place) or ".")

    if place == "tutorial.md":
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n[This page as a notebook](tutorial.ipynb)\n{rest}"
    return LINK.sub(shown, markdown)


def notebook(markdown: str) -> str:
    """Returns a Jupyter notebook: a cell for each block of Python, and for the text between two."""
    cells = []
    parts = re.split(r"^```python\n(.*?)^```\n", markdown, flags=re.DOTALL | re.MULTILINE)
    for number, text in enumerate(parts):
        if not text.strip():
            continue
        cell = {"id": f"cell-{number}", "metadata": {}, "source": text.strip()}
        if number % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell |= {"cell_type": "markdown"}
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    )


def _first_line(code: str, suffix: str) -> str:
    """The first paragraph's first line of a docstring, or of a comment."""
    if suffix == ".py":
        return (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
    return code.partition("\n")[0].lstrip("# ")
