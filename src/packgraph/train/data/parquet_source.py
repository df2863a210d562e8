"""Parquet tables through Hugging Face `datasets`, which maps them from disk: only rows in use are
in memory.

Rows are those of JSONL: text, chat messages, or tokens with an optional `seq_lengths` column. They
are checked as they are read, not when the table is opened, since tables may be larger than memory
and a look at every row takes as long as an epoch of tokenizing. What is read is the table that
`datasets` has converted when it was opened, so a file that is replaced during a run is never
trained on; it ends the run with the epoch. Only `Dataset.from_parquet` is used: it reads local
files and runs no code of the data set.
"""

import hashlib
from pathlib import Path
from typing import Any

from packgraph.train.data.bad_documents import BadDocuments
from packgraph.train.data.errors import DataError, MissingPackageError
from packgraph.train.data.file_stamp import FileStamp, check_all
from packgraph.train.data.files import files_of
from packgraph.train.data.source import SourceDocument, document_of_row

WHOLE, SAMPLE, SAMPLES = 2**25, 2**18, 64  # bytes, bytes, number
INSTALL = "pip install datasets"


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
        table = _load([str(file) for file in files], path)
        self._table: Any = table if limit is None else table.select(range(min(limit, len(table))))
        if not len(self):
            raise DataError(f"{path}: no rows (data.path)")
        if not skip_bad:
            self[0]
        described = [*(_digest(file) for file in files), str(len(self))]
        self.check_unchanged()
        self._fingerprint = hashlib.sha256(" ".join(described).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> SourceDocument:
        return document_of_row(self._table[index], f"{self._path}, row {index}", self._text_column)

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(self._stamps)

    def fingerprint(self) -> str:
        """Hash of the files' contents (of large files: size and samples, see `_digest`) and the
        number of rows."""
        return self._fingerprint


def _digest(file: Path) -> str:
    """Hash of a file: of all of it up to WHOLE bytes, else of its size and of evenly spread
    samples.

    The last sample holds Parquet's footer: sizes, places and statistics of all columns, which
    change with the rows.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= WHOLE:
            digest.update(stream.read())
        else:
            for number in range(SAMPLES):
                stream.seek((size - SAMPLE) * number // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def _load(files: list[str], path: str) -> Any:
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
        return datasets.Dataset.from_parquet(files)
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
    """Which file `datasets` could not read, which does not say so itself, and why."""
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
