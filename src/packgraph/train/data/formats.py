"""The sources of documents: JSON lines and files of text (`FileSource`), Parquet tables, and the
Python standard library.

All lines and texts are checked when a source is opened, so that a run of hours does not end at a
bad one: also the ids, labels, masks and boundaries of tokenized rows, which adds about half to the
time of reading their JSON. Only the places of documents are kept in memory, and the largest id,
which is held against the vocabulary when the tokenizer is known.

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
import sys
import sysconfig
import textwrap
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from packgraph.models.foreign import in_one_line, naming
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.files import FileStamp, OpenedFiles, files_of, read_unchanged, readable
from packgraph.train.data.rows import document_of_row, named
from packgraph.train.data.shards import ShardSource
from packgraph.train.data.source import (
    BadDocumentError,
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


class FileSource(OpenedFiles):
    """Documents from the lines of .jsonl files, or from files of text, each a document.

    Blank lines and files are left out. The fingerprint is of all lines, or texts.
    """

    def __init__(self, config: DataConfig, *, paired: bool = False) -> None:
        """paired: as in `document_of_row`. Raises DataError naming file and line of the first that
        is no document; with `on_bad` = skip those are left out and counted."""
        super().__init__()
        self._paired = paired
        self._text_column, self._has_lines = config.text_column, config.source == "jsonl"
        path, limit = config.path or "", config.max_documents_loaded or sys.maxsize
        # File number, line number, CRC-32 and byte offset of each document.
        self._places = array("q")
        digest = hashlib.sha256()
        for file in files_of(path, (".jsonl", ".json") if self._has_lines else config.suffixes):
            if len(self) >= limit:
                break
            with readable(file), file.open("rb") as stream:
                stamp, offset = FileStamp.of(os.fstat(stream.fileno())), 0
                self._stamped.append((file, stamp))
                for line, content in enumerate(stream if self._has_lines else [stream.read()], 1):
                    if len(self) >= limit:
                        break
                    if found := self._look(content, line, skip_bad=config.on_bad == "skip"):
                        place = len(self._stamped) - 1, line, crc32(content), offset
                        self._places.extend(place)
                        text = f"{found.text}\0".encode()
                        digest.update(content if self._has_lines else text)
                    offset += len(content)
                stamp.check(os.fstat(stream.fileno()), file)
        self._fingerprint = digest.hexdigest()[:16]
        if not len(self):
            blank = "only blank lines" if self._has_lines else "all text files are empty"
            bad = self.bad.count and f"only {self.bad.count} bad ones ({self.bad.first[0]})"
            raise DataError(
                f"{path}: no documents, {bad or blank}; is it the right one (data.path)?"
            )

    def __len__(self) -> int:
        return len(self._places) // 4

    def __getitem__(self, index: int) -> SourceDocument:
        number, line, *place = self._places[4 * index : 4 * index + 4]
        file, stamp = self._stamped[number]
        content = read_unchanged(file, stamp, *place, line=self._has_lines)
        found = self._parse(content, f"{file}:{line}" if self._has_lines else str(file))
        assert found is not None, "its bytes are those that were a document"
        return found

    def _look(self, content: bytes, line: int, *, skip_bad: bool) -> SourceDocument | None:
        """The document in a part of the file opened last; None where it is left out."""
        file = self._stamped[-1][0]
        where = f"{file}:{line}" if self._has_lines else str(file)
        try:
            document = self._parse(content, where)
            if document and document.row is not None:
                largest = largest_id(read_row(document.row, where))
                if largest > self.largest_id[0]:
                    self.largest_id = largest, where
        except BadDocumentError as error:
            if not skip_bad:
                raise
            self.bad.add(error)
            return None
        return document

    def _parse(self, content: bytes, where: str) -> SourceDocument | None:
        """A line or a file as a document, None where it is blank."""
        if self._has_lines and not content.strip():
            return None
        try:
            text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        except UnicodeDecodeError as error:
            raise BadDocumentError(
                f"{where}: not UTF-8 (byte {error.start}: {error.reason}); convert or remove it"
            ) from error
        if not self._has_lines:
            return SourceDocument(where, text=text) if text.strip() else None
        try:
            row: Any = json.loads(text.rstrip())
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
        return document_of_row(row, where, self._text_column, paired=self._paired)


class ParquetSource(OpenedFiles):
    """Documents from the rows of a .parquet file, or of all of them below a folder.

    The fingerprint is of the files' contents (see `sampled_digest`) and the number of rows.
    """

    def __init__(self, config: DataConfig, *, paired: bool = False) -> None:
        """paired: as in `document_of_row`. Raises DataError; MissingPackageError without
        `datasets`."""
        super().__init__()
        self._paired = paired
        self._text_column, self._path = config.text_column, config.path or ""
        files, digests, changes = files_of(self._path, (".parquet",)), [], []
        for file in files:
            with readable(file):
                status = file.stat()
                self._stamped.append((file, FileStamp.of(status)))
                digests.append(sampled_digest(file))
                changes.append(str(file.stat().st_ctime_ns))
        # Of large files a digest knows samples, and their times of change what else is written.
        table = _load([str(file) for file in files], self._path, " ".join(digests + changes))
        self._features = table.features
        limit = config.max_documents_loaded or len(table)
        self._table: Any = table.select(range(min(limit, len(table))))
        if not len(self):
            raise DataError(f"{self._path}: no rows (data.path)")
        if config.on_bad != "skip":
            self[0]
        self.check_unchanged()
        described = " ".join([*digests, str(len(self))])
        self._fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> SourceDocument:
        row = _without_gaps(self._table[index], self._features)
        where = f"{self._path}, row {index}"
        return document_of_row(row, where, self._text_column, paired=self._paired)


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
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: Parquet needs the package `datasets`: {INSTALL}"
        ) from error
    columns = []
    for file in files:
        with naming(file, "not a Parquet file", DataError):
            found = pyarrow.parquet.read_metadata(file)
            columns.append(sorted(found.schema.to_arrow_schema().names))
        if not found.num_rows or not columns[-1]:
            raise DataError(f"{file}: no rows (data.path); remove it")
        if columns[-1] != columns[0]:
            raise DataError(
                f"{file}: it has the columns {named(columns[-1])}, but {files[0]} has "
                f"{named(columns[0])}; give tables of the same columns"
            )
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what is wrong is said once, below
    try:
        # A folder of its own for these contents: `datasets` knows files by name and time alone.
        name = hashlib.sha256(digests.encode()).hexdigest()[:16]
        cache = Path(datasets.config.HF_DATASETS_CACHE) / f"packgraph-{name}"
        return datasets.Dataset.from_parquet(files, cache_dir=str(cache))
    except datasets.exceptions.DatasetGenerationError as error:
        for file in files:  # it does not say which one it could not read
            with naming(file, "damaged", DataError, "get it again, or remove it"):
                for _ in pyarrow.parquet.ParquetFile(file).iter_batches():
                    pass
        raise DataError(
            f"{path}: `datasets` cannot read it ({in_one_line(error.__cause__ or error)})"
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)


class StandardLibrarySource(OpenedFiles):
    """Documents from the modules in `folder`. unparsable: number of files that are no valid Python,
    left out."""

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        """limit: number of documents after which no more files are read. Raises DataError when
        there is nothing."""
        super().__init__()
        self._folder = folder or Path(sysconfig.get_paths()["stdlib"])
        self.unparsable = 0
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


def open_documents(config: DataConfig, *, paired: bool = False) -> DocumentSource:
    """The documents that `config` names, checked; paired: rows with `chosen` and `rejected`, both
    of which are learned from. Raises DataError saying where and what to do."""
    limit = config.max_documents_loaded
    if paired and config.source not in ("jsonl", "parquet"):
        raise DataError(
            f"{config.path}: a loss of pairs (loss.name) is of rows with `chosen` and `rejected`, "
            f"in .jsonl or .parquet, and this is read as {config.source}"
        )
    if config.source == "stdlib":
        return StandardLibrarySource(STDLIB_DOCUMENTS if limit is None else limit)
    if config.source == "shards":
        weights = config.weights()
        folders = [*weights] or [config.path or ""]
        return ShardSource(folders, [*weights.values()], None if weights else limit)
    kind = ParquetSource if config.source == "parquet" else FileSource
    return kind(config, paired=paired)
