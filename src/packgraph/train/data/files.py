"""Finding the files of a source."""

from collections.abc import Sequence
from pathlib import Path

from packgraph.train.data.errors import DataError


def files_of(path: str, suffixes: Sequence[str]) -> list[Path]:
    """`path` itself if it is a file (whatever its suffix), else all files below it with one of
    `suffixes`, sorted.

    Hidden files and folders are left out. Raises DataError when there is nothing.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{path}: no such file or folder (data.path)")
    found = sorted(
        file
        for file in root.rglob("*")
        if file.suffix.lower() in suffixes
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    )
    if not found:
        raise DataError(
            f"{path}: no files ending in {', '.join(suffixes)} below this folder (data.path)"
        )
    return found
