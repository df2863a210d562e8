"""JSONL: one JSON object a line.

All lines are checked when the source is opened, so that a run of hours does not end at a bad one:
also the ids, labels, masks and boundaries of tokenized rows, which adds about half to the time of
reading their JSON. Only the places of lines are kept in memory, and the largest id, which is held
against the vocabulary when the tokenizer is known.
"""

import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any

from packgraph.train.data.bad_documents import BadDocuments
from packgraph.train.data.errors import BadDocumentError, DataError
from packgraph.train.data.file_stamp import FileStamp, check_all, read_unchanged
from packgraph.train.data.files import files_of
from packgraph.train.data.source import SourceDocument, document_of_row
from packgraph.train.data.tokenized_row import largest_id, read_row


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
        self._places = array("q")  # file number, line number and byte offset of each document
        self._digest = hashlib.sha256()
        self._stamps: list[FileStamp] = []
        self._skip_bad, self.bad = skip_bad, BadDocuments()
        self.largest_id = -1, ""
        for number, file in enumerate(self._files):
            self._scan(number, file, limit)
        if not len(self):
            found = (
                f"only {self.bad.count} bad ones ({self.bad.first[0]})"
                if self.bad.count
                else "only blank lines"
            )
            raise DataError(f"{path}: no documents, {found}; is it the right file (data.path)?")

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: int) -> SourceDocument:
        number, line, offset = self._places[3 * index : 3 * index + 3]
        content = read_unchanged(self._files[number], self._stamps[number], offset, line=True)
        return self._parse(content, f"{self._files[number]}:{line}")

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(zip(self._files, self._stamps, strict=False))

    def fingerprint(self) -> str:
        """Hash of all lines."""
        return self._digest.hexdigest()[:16]

    def _scan(self, number: int, file: Path, limit: int | None) -> None:
        offset = 0
        with file.open("rb") as stream:
            stamp = FileStamp.of(os.fstat(stream.fileno()))
            self._stamps.append(stamp)
            for line, content in enumerate(stream, start=1):
                if limit is not None and len(self) >= limit:
                    break
                if content.strip() and self._is_good(content, f"{file}:{line}"):
                    self._places.extend((number, line, offset))
                    self._digest.update(content)
                offset += len(content)
            stamp.check(os.fstat(stream.fileno()), file)

    def _is_good(self, content: bytes, where: str) -> bool:
        """Whether a line is a document; counted if not. Raises BadDocumentError if bad ones are not
        left out."""
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
