"""The sources of documents: JSON lines, a folder of text files, Parquet tables, and the Python
standard library.

JSON lines (`JsonLinesSource`) have one JSON object a line.

All lines are checked when the source is opened, so that a run of hours does not end at a bad one:
also the ids, labels, masks and boundaries of tokenized rows, which adds about half to the time of
reading their JSON. Only the places of lines are kept in memory, and the largest id, which is held
against the vocabulary when the tokenizer is known.

A folder of text files (`TextFolderSource`) has a document in each. All are read once when the
source is opened, to find bad ones early.

Parquet tables (`ParquetSource`) come through Hugging Face `datasets`, which maps them from disk:
only rows in use are in memory.

Rows are those of JSONL: text, chat messages, or tokens with an optional `seq_lengths` column. They
are checked as they are read, not when the table is opened, since tables may be larger than memory
and a look at every row takes as long as an epoch of tokenizing. What is read is the table that
`datasets` has converted when it was opened, so a file that is replaced during a run is never
trained on; it ends the run with the epoch. Only `Dataset.from_parquet` is used: it reads local
files and runs no code of the data set.

The default is the source code of the Python standard library this interpreter runs with
(`StandardLibrarySource`), which needs no download.

One document for each function (its source, nested functions included), each class (its source
without its methods) and each module (its docstring and statements outside functions and classes),
so no line is there twice. Lengths are heavy-tailed. Files are read in a fixed shuffled order, so
that a limited number of documents is a sample of the whole.
"""

import ast
import hashlib
import json
import os
import random
import sysconfig
import textwrap
import warnings
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from packgraph.train.config.sections import DataConfig
from packgraph.train.data.files import FileStamp, check_all, files_of, read_unchanged, readable
from packgraph.train.data.rows import document_of_row
from packgraph.train.data.shards import ShardSource
from packgraph.train.data.source import (
    BadDocumentError,
    BadDocuments,
    DataError,
    DocumentSource,
    MissingPackageError,
    SourceDocument,
)
from packgraph.train.data.tokenizer import largest_id, read_row
from packgraph.train.run_files import sampled_digest

INSTALL = "pip install datasets"
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
# Reading the whole library takes ten seconds; this many documents are three million tokens.
STDLIB_DOCUMENTS = 6000


class JsonLinesSource:
    """Documents from the lines of a .jsonl file, or of all .jsonl files in a folder. Blank lines
    are skipped."""

    def __init__(
        self, path: str, text_column: str, limit: int | None = None, *, skip_bad: bool = False
    ) -> None:
        """limit: number of lines to read. skip_bad: leave out lines that are no documents, and
        count them in `bad`.

        Raises DataError with file:line for the first line that is no document, if they are not left
        out.
        """
        self._text_column = text_column
        self._files = files_of(path, (".jsonl", ".json"))
        # File number, line number, CRC-32 and byte offset of each document.
        self._places = array("q")
        self._stamps: list[FileStamp] = []
        self._skip_bad, self.bad = skip_bad, BadDocuments()
        self.largest_id = -1, ""
        digest = hashlib.sha256()
        for number, file in enumerate(self._files):
            for line in self._scan(number, file, limit):
                digest.update(line)
        self._fingerprint = digest.hexdigest()[:16]
        if not len(self):
            found = (
                f"only {self.bad.count} bad ones ({self.bad.first[0]})"
                if self.bad.count
                else "only blank lines"
            )
            raise DataError(f"{path}: no documents, {found}; is it the right file (data.path)?")

    def __len__(self) -> int:
        return len(self._places) // 4

    def __getitem__(self, index: int) -> SourceDocument:
        number, line, *place = self._places[4 * index : 4 * index + 4]
        content = read_unchanged(self._files[number], self._stamps[number], *place, line=True)
        return self._parse(content, f"{self._files[number]}:{line}")

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(zip(self._files, self._stamps, strict=False))

    def fingerprint(self) -> str:
        """Hash of all lines."""
        return self._fingerprint

    def _scan(self, number: int, file: Path, limit: int | None) -> Iterator[bytes]:
        """Note the places of a file's documents; yields their lines."""
        offset = 0
        with readable(file), file.open("rb") as stream:
            stamp = FileStamp.of(os.fstat(stream.fileno()))
            self._stamps.append(stamp)
            for line, content in enumerate(stream, start=1):
                if limit is not None and len(self) >= limit:
                    break
                if content.strip() and self._is_good(content, f"{file}:{line}"):
                    self._places.extend((number, line, crc32(content), offset))
                    yield content
                offset += len(content)
            stamp.check(os.fstat(stream.fileno()), file)

    def _is_good(self, content: bytes, where: str) -> bool:
        """Tells whether a line is a document, and counts it if not. Raises BadDocumentError if bad
        ones are not left out."""
        try:
            document = self._parse(content, where)
            if document.row is not None:
                largest = largest_id(read_row(document.row, where))
                if largest > self.largest_id[0]:
                    self.largest_id = largest, where
        except BadDocumentError as error:
            if not self._skip_bad:
                raise
            self.bad.add(error)
            return False
        return True

    def _parse(self, content: bytes, where: str) -> SourceDocument:
        try:
            # utf-8-sig: some editors begin a file with a byte order mark.
            row: Any = json.loads(content.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            raise BadDocumentError(
                f"{where}: not UTF-8 (byte {error.start}: {error.reason})"
            ) from error
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at")
            raise BadDocumentError(
                f"{where}: not JSON: {what} at column {error.colno}; every line must be one JSON "
                'object, such as {"text": "..."}'
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise BadDocumentError(f"{where}: not JSON that Python reads ({error})") from error
        except RecursionError as error:
            raise BadDocumentError(f"{where}: nested too deeply for a document") from error
        if not isinstance(row, dict):
            raise BadDocumentError(
                f'{where}: expected a JSON object such as {{"text": "..."}}, got '
                f"{type(row).__name__}"
            )
        return document_of_row(row, where, self._text_column)


class TextFolderSource:
    """Documents from the non-empty UTF-8 files with one of `suffixes` below `path` (or from the one
    file `path`)."""

    def __init__(
        self,
        path: str,
        suffixes: Sequence[str],
        limit: int | None = None,
        *,
        skip_bad: bool = False,
    ) -> None:
        """limit: number of files to read. skip_bad: leave out files that are not UTF-8, and count
        them in `bad`.

        Raises DataError naming the file that is not UTF-8, if they are not left out.
        """
        self._files: list[Path] = []
        self._stamps: list[tuple[FileStamp, int]] = []  # and CRC-32
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        digest = hashlib.sha256()
        for file in files_of(path, suffixes):
            if limit is not None and len(self._files) >= limit:
                break
            stamp = FileStamp.of(file.stat())
            content = read_unchanged(file, stamp)
            try:
                text = _decoded(file, content)
            except BadDocumentError as error:
                if not skip_bad:
                    raise
                self.bad.add(error)
                continue
            if text.strip():
                self._files.append(file)
                self._stamps.append((stamp, crc32(content)))
                digest.update(text.encode() + b"\0")
        if not self._files:
            raise DataError(
                f"{path}: all text files are empty{' or bad' if self.bad.count else ''} (data.path)"
            )
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> SourceDocument:
        file = self._files[index]
        content = read_unchanged(file, *self._stamps[index])
        return SourceDocument(str(file), text=_decoded(file, content))

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(zip(self._files, (stamp for stamp, _ in self._stamps), strict=True))

    def fingerprint(self) -> str:
        """Hash of all texts."""
        return self._fingerprint


def _decoded(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocumentError(
            f"{file}: not UTF-8 (byte {error.start}: {error.reason}); convert or remove it"
        ) from error


class ParquetSource:
    """Documents from the rows of a .parquet file, or of all of them below a folder."""

    def __init__(
        self, path: str, text_column: str, limit: int | None = None, *, skip_bad: bool = False
    ) -> None:
        """limit: number of rows to use. Raises DataError; MissingPackageError without
        `datasets`."""
        self._text_column = text_column
        self._path = path
        files = files_of(path, (".parquet",))
        self._stamps = [(file, FileStamp.of(file.stat())) for file in files]
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        digests = []
        for file in files:
            with readable(file):
                digests.append(sampled_digest(file))
        # Of large files a digest knows samples, and their times of change what else is written.
        changes = [str(file.stat().st_ctime_ns) for file in files]
        table = _load([str(file) for file in files], path, " ".join(digests + changes))
        self._features = table.features
        self._table: Any = table if limit is None else table.select(range(min(limit, len(table))))
        if not len(self):
            raise DataError(f"{path}: no rows (data.path)")
        if not skip_bad:
            self[0]
        self.check_unchanged()
        described = " ".join([*digests, str(len(self))])
        self._fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> SourceDocument:
        row = _without_gaps(self._table[index], self._features)
        return document_of_row(row, f"{self._path}, row {index}", self._text_column)

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(self._stamps)

    def fingerprint(self) -> str:
        """Hash of the files' contents (see `sampled_digest`) and the number of rows."""
        return self._fingerprint


def _without_gaps(value: Any, feature: Any) -> Any:
    """A value without the None of fields that it lacks: a table gives all objects of a column the
    fields of all others, and a call of a tool would get arguments that nobody wrote."""
    if isinstance(feature, dict) and isinstance(value, dict):
        there = {name: one for name, one in value.items() if one is not None}
        return {name: _without_gaps(one, feature[name]) for name, one in there.items()}
    inner = getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inner, dict) or hasattr(inner, "feature")):
        return [_without_gaps(one, inner) for one in value]
    return value


def _load(files: list[str], path: str, digests: str) -> Any:
    """The table of files with these digests."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: Parquet needs the package `datasets`: {INSTALL}"
        ) from error
    columns = {file: _columns(file) for file in files}
    for file in files:
        if columns[file] != columns[files[0]]:
            raise DataError(
                f"{file}: it has the columns {_named(columns[file])}, but {files[0]} has "
                f"{_named(columns[files[0]])}; give tables of the same columns"
            )
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said once, below
    try:
        # A folder of its own for these contents: `datasets` knows files by name and time alone.
        name = hashlib.sha256(digests.encode()).hexdigest()[:16]
        cache = Path(datasets.config.HF_DATASETS_CACHE) / f"packgraph-{name}"
        return datasets.Dataset.from_parquet(files, cache_dir=str(cache))
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(_why(files, path, error)) from error
    finally:
        datasets.logging.set_verbosity(verbosity)


def _columns(file: str) -> list[str]:
    """Names of the columns of a table. Raises DataError for one that is damaged, or has no rows or
    columns."""
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_metadata(file)
        names = sorted(found.schema.to_arrow_schema().names)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a Parquet file ({_first_line(error)})") from error
    if not found.num_rows or not names:
        raise DataError(f"{file}: no rows (data.path); remove it")
    return names


def _why(files: list[str], path: str, error: Exception) -> str:
    """Names the file that `datasets` could not read (it does not say so itself), and the reason."""
    import pyarrow.parquet

    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                for _ in table.iter_batches():
                    pass
        except (pyarrow.ArrowException, OSError) as damage:
            return f"{file}: damaged ({_first_line(damage)}); get it again, or remove it"
    return f"{path}: `datasets` cannot read it ({_first_line(error.__cause__ or error)})"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _named(columns: list[str]) -> str:
    return ", ".join(columns[:8]) + (f" and {len(columns) - 8} more" if len(columns) > 8 else "")


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


def open_documents(config: DataConfig) -> DocumentSource:
    """The documents that `config` names, checked. Raises DataError saying where and what to do."""
    limit, skip_bad = config.max_documents_loaded, config.on_bad == "skip"
    if config.source == "stdlib":
        return StandardLibrarySource(STDLIB_DOCUMENTS if limit is None else limit)
    path = config.path or ""
    if config.source == "jsonl":
        return JsonLinesSource(path, config.text_column, limit, skip_bad=skip_bad)
    if config.source == "shards":
        weights = config.weights()
        return ShardSource([*weights] or [path], [*weights.values()], None if weights else limit)
    if config.source == "text":
        return TextFolderSource(path, config.suffixes, limit, skip_bad=skip_bad)
    return ParquetSource(path, config.text_column, limit, skip_bad=skip_bad)
