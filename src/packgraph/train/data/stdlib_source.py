"""The default text: the source code of the Python standard library this interpreter runs with.
Needs no download.

One document for each function (its source, nested functions included), each class (its source
without its methods) and each module (its docstring and statements outside functions and classes),
so no line is there twice. Lengths are heavy-tailed. Files are read in a fixed shuffled order, so
that a limited number of documents is a sample of the whole.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from packgraph.train.data.bad_documents import BadDocuments
from packgraph.train.data.errors import DataError
from packgraph.train.data.source import SourceDocument

SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_bundled",
        "lib2to3",
        "pydoc_data",
    }
)
SHORTEST = 40
Block = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class StandardLibrarySource:
    """Documents from the modules in `folder`. unparsable: number of files that are no valid Python,
    left out."""

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        """limit: number of documents after which no more files are read. Raises DataError when
        there is nothing."""
        self._folder = folder or Path(sysconfig.get_paths()["stdlib"])
        self.unparsable = 0
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        self._documents: list[SourceDocument] = []
        for path in _modules(self._folder):
            self._documents += self._read(path)
            if limit is not None and len(self._documents) >= limit:
                del self._documents[limit:]
                break
        if not self._documents:
            raise DataError(
                f"{self._folder}: no Python source files of the standard library here; use another "
                "source "
                "(data.source = jsonl or text, with data.path)"
            )
        digest = hashlib.sha256()
        for document in self._documents:
            digest.update((document.text or "").encode() + b"\0")
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> SourceDocument:
        return self._documents[index]

    def check_unchanged(self) -> None:
        """Nothing to check: all documents are in memory."""

    def fingerprint(self) -> str:
        """Hash of all texts."""
        return self._fingerprint

    def _read(self, path: Path) -> list[SourceDocument]:
        try:
            source = path.read_bytes().decode("utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", (SyntaxWarning, DeprecationWarning))
                tree = ast.parse(source)
        except (
            SyntaxError,
            ValueError,
        ):  # ValueError: undecodable bytes, or null bytes in the source
            self.unparsable += 1
            return []
        name = path.relative_to(self._folder).as_posix()
        # ast counts lines by newlines only; str.splitlines would also split at form feeds.
        lines = source.replace("\r\n", "\n").split("\n")
        return [
            SourceDocument(f"{name}:{line}", text=text)
            for line, text in _documents(tree, lines)
            if len(text) >= SHORTEST
        ]


def _modules(folder: Path) -> list[Path]:
    """All modules below `folder` but tests and installed packages, in a fixed shuffled order."""
    found = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    ]
    random.Random(0).shuffle(found)
    return found


def _documents(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """(line number, text) of the module and of every function and class in it."""
    yield 1, _without(1, len(lines), tree.body, lines)
    waiting = [node for node in tree.body if isinstance(node, Block)]
    for node in waiting:
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        stop = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef):
            yield start, _without(start, stop, node.body, lines)
            waiting += [inner for inner in node.body if isinstance(inner, Block)]
        else:
            yield start, _without(start, stop, [], lines)


def _without(start: int, stop: int, body: list[ast.stmt], lines: list[str]) -> str:
    """Lines `start` to `stop` (from 1, inclusive) without the functions and classes in `body`,
    dedented."""
    left_out: set[int] = set()
    for node in body:
        if isinstance(node, Block):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            left_out.update(range(first, (node.end_lineno or node.lineno) + 1))
    kept = [
        lines[number - 1].rstrip() for number in range(start, stop + 1) if number not in left_out
    ]
    # Where a function was cut out, its empty lines on both sides meet.
    text = textwrap.dedent("\n".join(kept)).strip("\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text
