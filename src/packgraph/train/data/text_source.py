"""A folder of text files, each one document. All are read once when the source is opened, to find bad ones early."""
import hashlib
from collections.abc import Sequence
from pathlib import Path

from packgraph.train.data.errors import DataError
from packgraph.train.data.files import files_of
from packgraph.train.data.source import SourceDocument


class TextFolderSource:
    """Documents from the non-empty UTF-8 files with one of `suffixes` below `path` (or from the one file `path`)."""

    def __init__(self, path: str, suffixes: Sequence[str], limit: int | None = None) -> None:
        """limit: number of files to read. Raises DataError naming the file that is not UTF-8."""
        self._files: list[Path] = []
        digest = hashlib.sha256()
        for file in files_of(path, suffixes):
            if limit is not None and len(self._files) >= limit:
                break
            text = _read(file)
            if text.strip():
                self._files.append(file)
                digest.update(text.encode() + b"\0")
        if not self._files:
            raise DataError(f"{path}: all text files are empty (data.path)")
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> SourceDocument:
        return SourceDocument(str(self._files[index]), text=_read(self._files[index]))

    def fingerprint(self) -> str:
        """Hash of all texts."""
        return self._fingerprint


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 (byte {error.start}: {error.reason}); convert or remove it") from error
