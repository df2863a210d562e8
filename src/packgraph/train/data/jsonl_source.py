"""JSONL: one JSON object a line.

All lines are checked when the source is opened, so that a run of hours does not end at a bad one; only their places are
kept in memory.
"""
import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

from packgraph.train.data.errors import DataError
from packgraph.train.data.files import files_of
from packgraph.train.data.source import SourceDocument, document_of_row


class JsonLinesSource:
    """Documents from the lines of a .jsonl file, or of all .jsonl files in a folder. Blank lines are skipped."""

    def __init__(self, path: str, text_column: str, limit: int | None = None) -> None:
        """limit: number of lines to read. Raises DataError with file:line for the first line that is no document."""
        self._text_column = text_column
        self._files = files_of(path, (".jsonl", ".json"))
        self._places = array("q")  # file number, line number and byte offset of each document
        self._digest = hashlib.sha256()
        for number, file in enumerate(self._files):
            self._scan(number, file, limit)
        if not len(self):
            raise DataError(f"{path}: no documents, only blank lines; is it the right file (data.path)?")

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: int) -> SourceDocument:
        number, line, offset = self._places[3 * index : 3 * index + 3]
        with self._files[number].open("rb") as stream:
            stream.seek(offset)
            return self._parse(stream.readline(), f"{self._files[number]}:{line}")

    def fingerprint(self) -> str:
        """Hash of all lines."""
        return self._digest.hexdigest()[:16]

    def _scan(self, number: int, file: Path, limit: int | None) -> None:
        offset = 0
        with file.open("rb") as stream:
            for line, content in enumerate(stream, start=1):
                if limit is not None and len(self) >= limit:
                    return
                if content.strip():
                    self._parse(content, f"{file}:{line}")
                    self._places.extend((number, line, offset))
                    self._digest.update(content)
                offset += len(content)

    def _parse(self, content: bytes, where: str) -> SourceDocument:
        try:
            # utf-8-sig: some editors begin a file with a byte order mark.
            row: Any = json.loads(content.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 (byte {error.start}: {error.reason})") from error
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at")
            raise DataError(f"{where}: not JSON: {what} at column {error.colno}; every line must be one JSON object, "
                            'such as {"text": "..."}') from error
        except RecursionError as error:
            raise DataError(f"{where}: nested too deeply for a document") from error
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected a JSON object such as {{"text": "..."}}, got {type(row).__name__}')
        return document_of_row(row, where, self._text_column)
