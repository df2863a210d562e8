"""Errors that foreign code raises about a user's file, as one line that names the file.

    user's file ─▶ transformers, tokenizers, safetensors, datasets, json, the file system
                     └ raises what it likes ─▶ `naming` ─▶ DataError, ConfigError, WeightsError

The invariant: whatever foreign code makes of a file, the user reads which file it is, what was said
of it, and what to do. A fault of packgraph keeps its class and its traceback, also within a block.
"""

import json
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

MOST_SHOWN = 400  # characters of a foreign error
REMEDY = "repair it or remove it"
LARGEST = 2**30  # bytes of a JSON file
# Bounds are written so; NaN is a number of no file.
CONSTANTS = {"Infinity": math.inf, "-Infinity": -math.inf}


class naming:
    """Turns what foreign code raises within the block into one line that names the user's file.

    Args:
        place: The file or folder.
        what: What could not be done with it.
        kind: Makes the error of a text.
        remedy: What to do.
    """

    def __init__(
        self, place: Path | str, what: str, kind: Callable[[str], Exception], remedy: str = ""
    ) -> None:
        self._before, self._kind = f"{place}: {what}: ", kind
        self._after = f"; {remedy}" if remedy else ""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and _is_foreign(error):
            raise self._kind(f"{self._before}{in_one_line(error)}{self._after}") from error


def in_one_line(error: BaseException) -> str:
    """Returns class and words of an error, or what the system says of a file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "nested too deeply"
    words = " ".join(str(error).split()).rstrip(".")
    words = words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN]}…"
    name = type(error).__name__
    return words if words and type(error) in (Exception, ValueError) else f"{name}: {words}"


def _is_foreign(error: BaseException) -> bool:
    """Returns whether an error comes from foreign code, and is none that packgraph raises."""
    kind = type(error)
    if not isinstance(error, Exception):  # of Rust code, a class without a public name
        return kind.__name__ == "PanicException"
    home = kind.__module__.partition(".")[0]
    if home != "builtins" or kind is Exception or isinstance(error, OSError):
        return home not in ("packgraph", "torch")  # such as memory that a device has not
    # torch raises errors of Python for those who call it.
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    homes = [str(names.get("__name__")).partition(".")[0] for names in frames]
    return next((home for home in reversed(homes) if home != "torch"), "") != "packgraph"


def read_text(file: Path, kind: Callable[[str], Exception], remedy: str = REMEDY) -> str:
    """Returns the text of a user's file. Raises what `kind` makes, also for what is no file."""
    if not file.is_file():  # a pipe would be waited for
        what = "it is no file" if file.exists() else "there is no such file"
        raise kind(f"{file}: cannot be read: {what}; {remedy}")
    if file.stat().st_size > LARGEST:
        raise kind(f"{file}: cannot be read: larger than any such file is; {remedy}")
    with naming(file, "cannot be read", kind, remedy):
        return file.read_text(encoding="utf-8")


def read_object(
    file: Path, kind: Callable[[str], Exception], remedy: str = REMEDY
) -> dict[str, Any]:
    """Returns the JSON object in a user's file. Raises what `kind` makes for anything else."""
    text = read_text(file, kind, remedy)
    with naming(file, "not valid JSON", kind, remedy):
        content = json.loads(text, parse_constant=CONSTANTS.__getitem__)
    if not isinstance(content, dict):
        raise kind(f"{file}: holds a {type(content).__name__}, not a JSON object; {remedy}")
    return content
