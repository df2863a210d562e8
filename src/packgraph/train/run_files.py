"""Files of a run that cannot be written or are damaged: one clear error instead of whatever the system says.

The disk may fill up at any line of a run. The invariant: such an end names the file, the cause and the way out, and
what was written before stays usable.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunFileError(RuntimeError):
    """A file or folder of a run that cannot be written or is damaged. The message names it and says what to do."""


REMEDY = "Make room there or choose another --run.folder; a run that has a checkpoint goes on by --resume"


@contextmanager
def writing(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Within the block `path` is written; an OSError becomes a RunFileError naming it, and what to do."""
    try:
        yield
    except OSError as error:
        raise RunFileError(f"{path}: could not be written: {error.strerror or error}. {remedy}") from error
