"""A folder of text files, each one document. All are read once when the source is opened, to find
bad ones early."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from packgraph.train.data.bad_documents import BadDocuments
from packgraph.train.data.errors import BadDocumentError, DataError
from packgraph.train.data.file_stamp import FileStamp, check_all, read_unchanged
from packgraph.train.data.files import files_of
from packgraph.train.data.source import SourceDocument


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
        self._stamps: list[FileStamp] = []
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        digest = hashlib.sha256()
        for file in files_of(path, suffixes):
            if limit is not None and len(self._files) >= limit:
                break
            stamp = FileStamp.of(file.stat())
            try:
                text = _read(file, stamp)
            except BadDocumentError as error:
                if not skip_bad:
                    raise
                self.bad.add(error)
                continue
            if text.strip():
                self._files.append(file)
                self._stamps.append(stamp)
                digest.update(text.encode() + b"\0")
        if not self._files:
            raise DataError(
                f"{path}: all text files are empty{' or bad' if self.bad.count else ''} (data.path)"
            )
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> SourceDocument:
        return SourceDocument(
            str(self._files[index]), text=_read(self._files[index], self._stamps[index])
        )

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(zip(self._files, self._stamps, strict=True))

    def fingerprint(self) -> str:
        """Hash of all texts."""
        return self._fingerprint


def _read(file: Path, stamp: FileStamp) -> str:
    try:
        return read_unchanged(file, stamp).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDocumentError(
            f"{file}: not UTF-8 (byte {error.start}: {error.reason}); convert or remove it"
        ) from error
