"""One value of a configuration: from text or from a file's typed value to a Python type, and back
to JSON.

Known types: bool, int, float, str, Path, `Literal[...]`, `X | None`, `X | Literal[...]`,
`tuple[X, ...]`, `tuple[X, Y]`, `Annotated[int, LEAST]`, `Annotated[str, (CHOICE, ...)]` and
`Capacity`, which is written `TOKENSxDOCUMENTS` or `TOKENSxDOCUMENTSxLONGEST`. The invariant: a
value is taken only when nothing is guessed; `3.5` is no int, `1` is no bool, and a problem says
what was expected and what was found.
"""

import dataclasses
import math
import os
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from packgraph.packing.capacity import Capacity, in_short

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NONE_WORDS = ("none", "off", "null")
SHOWN = 80  # characters of a wrong value that a problem quotes
LIMIT = 2**63  # whole numbers are below it: seeds and counts are 64-bit integers of torch and NumPy
# Bytes; a path leaves room for the names below it (PATH_MAX is 4,096).
LONGEST_NAME, LONGEST_PATH = 255, 3800

Count = Annotated[int, 1]


class ValueProblem(ValueError):
    """A value that does not fit its type; the message says what was expected and what was found."""


def true_of(problems: Mapping[str, bool]) -> list[str]:
    """The texts whose condition is true."""
    return [text for text, wrong in problems.items() if wrong]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values by their dotted names. No recursion: a file may be nested deeply."""
    found, waiting = dict[str, Any](), list(values.items())
    for name, value in waiting:
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    """`value` as a problem quotes it: all of it if it is short."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists within lists
        text = f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """`text` without what would steer a terminal or cannot be encoded: such letters as Python
    escapes them."""
    return "".join(
        letter
        if letter == "\n" or text_problem(letter) is None
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in text
    )


def text_problem(text: str) -> str | None:
    """Reason why `text` cannot be a name, path or word in files and terminals, or None."""
    for place, letter in enumerate(text):
        kind = unicodedata.category(letter)
        if kind in ("Cc", "Cs", "Zl", "Zp"):
            what = "is not valid Unicode" if kind == "Cs" else "is a control character"
            return f"{letter!r} at character {place} {what}"
    return None


def path_problem(path: str) -> str | None:
    """Reason why no file or folder can have this path, or None."""
    if problem := text_problem(path):
        return problem
    size = len(os.fsencode(path))
    if size > LONGEST_PATH:
        return f"it has {size:,} bytes, more than the {LONGEST_PATH:,} that a path may have here"
    longest = max(len(os.fsencode(name)) for name in path.split("/"))
    if longest > LONGEST_NAME:
        return f"a name in it has {longest:,} bytes, more than the {LONGEST_NAME} of a file system"
    return None


def resolved_types(section: type) -> dict[str, Any]:
    """Field name → type of a dataclass, with string annotations resolved."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def option(default: Any, text: str, **more: Any) -> Any:
    """A field of a dataclass that holds the options of a command.

    Args:
        default: Value without the option.
        text: Its help; `{own.NAME}` stands for an attribute of the dataclass.
        **more: `metavar` (what stands for the value in help), `bare` (what it means without a
            value), `positional` (it is given by its place), `required`.

    Returns:
        The field.
    """
    return dataclasses.field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class CommandArguments:
    """Options of every command."""

    help: Literal["short", "all"] | None = option(
        None, "explain this command", metavar="", bare="short"
    )


def is_section(value: Any) -> bool:
    """Tells whether a field's value is a nested section (and not a leaf such as a Capacity)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Capacity))


def convert(value: Any, expected: Any, *, from_text: bool) -> Any:
    """`value` as `expected`. Text (`from_text`) is parsed; values of a file are checked. Raises
    ValueProblem."""
    origin = get_origin(expected)
    for kind, special in CONVERT.items():
        if kind in (origin, expected):
            return special(value, expected, from_text)
    if expected is Path and isinstance(value, str | Path):
        if problem := path_problem(str(value)):
            raise ValueProblem(f"expected a path, got {shown(str(value))}: {problem}")
        return Path(value)
    if expected is str and isinstance(value, str):
        if problem := text_problem(value):
            raise ValueProblem(f"expected text, got {shown(value)}: {problem}")
        return value
    raise _unlike(expected, value)


def _unlike(expected: Any, value: Any) -> ValueProblem:
    return ValueProblem(f"expected {describe(expected)}, got {shown(value)}")


def _convert_union(value: Any, expected: Any, from_text: bool) -> Any:
    """A value of `X | None`, `X | Literal[...]`: none and the words come first."""
    if type(None) in get_args(expected) and (
        value is None or (isinstance(value, str) and value.lower() in NONE_WORDS)
    ):
        return None
    members = [member for member in get_args(expected) if member is not type(None)]
    words = [
        word for member in members if get_origin(member) is Literal for word in get_args(member)
    ]
    if isinstance(value, str) and value in words:
        return value
    inner = [member for member in members if get_origin(member) is not Literal] or members
    if len(inner) != 1:
        raise TypeError(f"unions of several types are not supported in a configuration: {expected}")
    try:
        return convert(value, inner[0], from_text=from_text)
    except ValueProblem as problem:
        others = [describe(member) for member in get_args(expected) if member is not inner[0]]
        raise ValueProblem(
            f"{problem} (or {', '.join(f'`{other}`' for other in others)})"
        ) from None


def _convert_literal(value: Any, expected: Any, from_text: bool) -> Any:
    for choice in get_args(expected):
        if (
            (str(choice) == value)
            if from_text
            else (choice == value and type(choice) is type(value))
        ):
            return choice
    raise _unlike(expected, value)


def _convert_annotated(value: Any, expected: Any, from_text: bool) -> Any:
    kind, rule = get_args(expected)
    if isinstance(rule, tuple):
        return _convert_literal(value, Literal[rule], from_text)
    found = convert(value, kind, from_text=from_text)
    if found < rule:
        raise _unlike(expected, value)
    return found


def choices_of(expected: Any) -> tuple[str, ...]:
    """The words that a value of this type can be, for completion; empty where it is not one of a
    few."""
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is bool:
        return ("true", "false")
    if origin is Literal:
        return tuple(map(str, arguments))
    if origin is Annotated:
        return arguments[1] if isinstance(arguments[1], tuple) else ()
    if origin in (Union, types.UnionType, tuple):
        return tuple(word for part in arguments for word in choices_of(part))
    return ()


def _convert_tuple(value: Any, expected: Any, from_text: bool) -> tuple[Any, ...]:
    arguments = get_args(expected)
    if isinstance(value, str):
        from_text = True
        value = "" if value.lower() == "none" else value
        items: Sequence[Any] = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        raise _unlike(expected, value)
    several = len(arguments) == 2 and arguments[1] is Ellipsis
    wanted: Sequence[Any] = [arguments[0]] * len(items) if several else arguments
    if len(items) != len(wanted):
        raise ValueProblem(f"expected {len(wanted)} values, got {len(items)}: {shown(value)}")
    return tuple(convert(item, kind, from_text=from_text) for item, kind in zip(items, wanted))


def _convert_capacity(value: Any, expected: Any, from_text: bool) -> Capacity:
    try:
        if isinstance(value, Capacity):
            return value
        if isinstance(value, str):
            numbers = [int(part) for part in value.lower().split("x")]
            if len(numbers) in (2, 3):
                return Capacity(*numbers)
        if isinstance(value, Mapping):
            return Capacity(**value)
    except (ValueError, TypeError) as error:
        if isinstance(value, str) and not all(part.isdigit() for part in value.lower().split("x")):
            raise _unlike(Capacity, value) from error
        raise ValueProblem(f"not a capacity: {shown(value)}: {error}") from error
    raise _unlike(Capacity, value)


def _convert_bool(value: Any, expected: Any, from_text: bool) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if from_text and isinstance(value, str) else None
    if word in TRUE_WORDS + FALSE_WORDS:
        return word in TRUE_WORDS
    raise _unlike(expected, value)


def _convert_number(value: Any, expected: type, from_text: bool) -> int | float:
    if from_text and isinstance(value, str):
        try:
            value = int(value.replace("_", "")) if expected is int else float(value)
        except ValueError:
            raise _unlike(expected, value) from None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (expected is int and not isinstance(value, int)):
        raise _unlike(expected, value)
    if isinstance(value, int) and abs(value) >= LIMIT:
        raise ValueProblem(f"expected a whole number below 2^63, got {shown(value)}")
    if not math.isfinite(value):
        raise ValueProblem(f"expected a finite number, got {shown(value)}")
    return expected(value)


CONVERT: dict[Any, Callable[[Any, Any, bool], Any]] = {
    Union: _convert_union,
    types.UnionType: _convert_union,
    Literal: _convert_literal,
    tuple: _convert_tuple,
    Annotated: _convert_annotated,
    Capacity: _convert_capacity,
    bool: _convert_bool,
    int: _convert_number,
    float: _convert_number,
}


def describe(expected: Any) -> str:
    """A type in words, as shown in help and problems."""
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(
            "none" if part is type(None) else describe(part) for part in get_args(expected)
        )
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(expected))
    if origin is Annotated:
        kind, rule = get_args(expected)
        if isinstance(rule, tuple):
            return " | ".join(rule)
        return f"{describe(kind)} of at least {rule}"
    if origin is tuple:
        arguments = get_args(expected)
        if arguments[-1] is Ellipsis:
            return f"{describe(arguments[0])}, ..."
        return ", ".join(describe(part) for part in arguments)
    words = {
        type(None): "none",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
        Capacity: "TOKENSxDOCUMENTS[xLONGEST]",
    }
    return words.get(expected, str(expected))


def plain(value: Any) -> Any:
    """A leaf as a JSON-able value that `convert` reads back equal."""
    if isinstance(value, Capacity):
        return render(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def render(value: Any) -> str:
    """A leaf as the text a user would type for it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Capacity):
        return in_short(value)
    if isinstance(value, tuple):
        return ",".join(render(item) for item in value) or "none"
    return str(value)
