"""The files of a source: which they are, and whether one is still that which was opened at the
start of a run (`OpenedFiles`, the base of sources of files).

A stamp is compared with the handle that was read from, after reading: so what was read is what the
stamp belongs to, whether the file was replaced by another or written to in place. Contents are
compared when a run is resumed (`DocumentSource.fingerprint`); a stamp costs one system call a
document.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from packgraph.models.foreign import naming
from packgraph.train.data.source import BadDocuments, DataChangedError, DataError

# Endings of files that hold documents and are not read, and what to do.
UNREAD = {
    ".gz": "unpack it: gunzip --keep FILE",
    ".zst": "unpack it: unzstd FILE",
    ".xz": "unpack it: unxz --keep FILE",
    ".bz2": "unpack it: bunzip2 --keep FILE",
    ".zip": "unpack it",
    ".tar": "unpack it",
    ".arrow": "write it as Parquet: datasets.load_from_disk(FOLDER).to_parquet(FILE)",
}


def files_of(path: str, suffixes: Sequence[str]) -> list[Path]:
    """`path` itself if it is a file (whatever its suffix), else all files below it with one of
    `suffixes`, sorted.

    Hidden files and folders are left out. Raises DataError when there is nothing.
    """
    root = Path(path).expanduser()
    if root.is_file():
        _check_packed(root)
        return [root]
    if not root.is_dir():
        raise DataError(f"{path}: no such file or folder (data.path)")
    there = sorted(_below(root))
    for file in there:
        if file.suffix.lower() == ".arrow" or set(map(str.lower, file.suffixes)) & set(suffixes):
            _check_packed(file)
    found = [file for file in there if file.suffix.lower() in suffixes]
    if not found:
        raise DataError(
            f"{path}: no files ending in {', '.join(suffixes)} below this folder (data.path)"
        )
    if odd := [file for file in found if not file.is_file()]:
        raise DataError(f"{odd[0]}: not a file, or a link to none; restore or remove it")
    return found


def _below(root: Path) -> Iterator[Path]:
    """All files below a folder that are not hidden. Raises DataError for folders that cannot be
    read, and links to others that are not below."""

    def refuse(error: OSError) -> None:
        with readable(Path(error.filename)):
            raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in folders):
            if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
                raise DataError(
                    f"{path}: a link to a folder elsewhere, which is not followed; move that "
                    "folder here, or remove the link"
                )
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _check_packed(file: Path) -> None:
    """Raise DataError for a file whose ending says that it must be unpacked or converted first."""
    if remedy := UNREAD.get(file.suffix.lower()):
        raise DataError(f"{file}: {file.suffix} is not read; {remedy}")


@dataclass(frozen=True)
class FileStamp:
    """Size in bytes, time of the last change in nanoseconds, and inode of a file."""

    size: int
    changed_ns: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> "FileStamp":
        """The stamp in what `os.stat` or `os.fstat` says."""
        return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, status: os.stat_result, file: Path) -> None:
        """Raise DataChangedError naming `file` if `status` is not that of this stamp."""
        now = FileStamp.of(status)
        if now == self:
            return
        what = (
            f"its size was {self.size:,} bytes and is {now.size:,}"
            if now.size != self.size
            else "another file has taken its place"
            if now.inode != self.inode
            else "it was written to"
        )
        raise changed(file, what)


def changed(file: Path, what: str) -> DataChangedError:
    """The error for a file that is not what it was. what: how it differs."""
    return DataChangedError(
        f"{file}: changed since the run opened it ({what}), so what the run trains on is no longer "
        "what it began with; put the file back and resume the run, or start a new one"
    )


def readable(file: Path) -> naming:
    """Within the block `file` is read; a DataError says that it cannot be."""
    return naming(file, "cannot be read", DataError, "see to it, or leave it out (data.path)")


def read_unchanged(
    file: Path,
    stamp: FileStamp,
    checksum: int | None = None,
    offset: int = 0,
    *,
    line: bool = False,
) -> bytes:
    """The bytes of `file` from `offset` on, or one line. Raises DataChangedError if it is not that
    of `stamp`, or these bytes not those of the CRC-32 `checksum`: times can be put back."""
    with readable(file):
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                content = stream.readline() if line else stream.read()
                stamp.check(os.fstat(stream.fileno()), file)
        except FileNotFoundError as error:
            raise changed(file, "it is gone") from error
    if checksum not in (None, crc32(content)):
        raise changed(file, "it was written to")
    return content


def check_all(stamped: Iterable[tuple[Path, FileStamp]]) -> None:
    """Raise DataChangedError naming the first file that is not that of its stamp."""
    for file, stamp in stamped:
        try:
            stamp.check(file.stat(), file)
        except FileNotFoundError as error:
            raise changed(file, "it is gone") from error


class OpenedFiles:
    """Base of a `DocumentSource` of files. Its constructor fills in what is found.

    Attributes:
        bad: Documents that were left out when the source was opened.
        largest_id: As of `DocumentSource`.
    """

    def __init__(self) -> None:
        self.bad, self.largest_id = BadDocuments(), (-1, "")
        self._stamped: list[tuple[Path, FileStamp]] = []
        self._fingerprint = ""

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when it was opened."""
        check_all(self._stamped)

    def fingerprint(self) -> str:
        """Hash of what was found."""
        return self._fingerprint
