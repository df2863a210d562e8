"""Reading nested frozen dataclasses from files and the command line.

The problem: a run is described by a tree of small frozen dataclasses. Its values come from a
preset, then a TOML or JSON file, then `--dotted.options`. One typo must not cost a started run, and
ten typos must not cost ten attempts.

The invariant: either every value given is known, well typed and accepted by its dataclass, or one
`ConfigError` lists all problems at once, each with its place (file and key, or option) and, for an
unknown key, the nearest known one. `to_dict` is the inverse of `read_config`: what it writes reads
back equal.

    preset ─▶ Layer(file, {...}) ─▶ Layer(option, {...}) ─▶ typed values ─▶ frozen dataclass

Known types: bool, int, float, str, Path, `Literal[...]`, `X | None`, `X | Literal[...]`,
`tuple[X, ...]`, `tuple[X, Y]`, `Annotated[int, LEAST]`, `Annotated[str, (CHOICE, ...)]` and
`Capacity`, which is written `TOKENSxDOCUMENTS` or `TOKENSxDOCUMENTSxLONGEST`. A value is taken only
when nothing is guessed; `3.5` is no int, `1` is no bool, and a problem says what was expected and
what was found.
"""

import dataclasses
import difflib
import importlib
import math
import os
import re
import tomllib
import types
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.capacity import Capacity, in_short
from packgraph.train.run_files import CHECKSUM, once, parse_json

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


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
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
    if isinstance(value, Capacity):
        return value
    parts = value.lower().split("x") if isinstance(value, str) else []
    try:
        if len(parts) in (2, 3):
            return Capacity(*map(int, parts))
        if isinstance(value, Mapping):
            return Capacity(**value)
    except (ValueError, TypeError) as error:
        if all(part.isdigit() for part in parts):
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


T = TypeVar("T")


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, found in one pass. `problems` holds one line
    for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__(
            f"{len(self.problems)} {noun} in the configuration:\n  " + "\n  ".join(self.problems)
        )

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        """Pickles the problems alone."""
        return type(self), (self.problems,)


def one_problem(text: str) -> ConfigError:
    """Returns the error for one thing that is wrong."""
    return ConfigError([text])


# Options of earlier versions: the value that is left out without a word, and why they are gone.
RETIRED: Mapping[str, tuple[Any, str]] = {
    "model.merge_projections": (False, "for it made nothing faster"),
    "model.linear_product": ("native", "see model.precision"),
}


@dataclass(frozen=True)
class ConfigLayer:
    """Values from one place.

    where: a file name or `command line`. values: nested, or by dotted paths. text: leaves are text
    to parse. problems: what was wrong
    before values could be told apart. others: options of the command itself, of which an unknown
    one may be meant. positional: paths that are given by their place among the words.
    """

    where: str
    values: Mapping[str, Any]
    text: bool = False
    problems: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    positional: frozenset[str] = frozenset()

    def place(self, path: str) -> str:
        if path in self.positional:
            return path.upper()
        path = path if len(path) <= SHOWN else path[:SHOWN] + "…"
        return f"--{path.replace('_', '-')}" if self.text else f"{self.where}: {path}"


def read_config(base: T, layers: Sequence[ConfigLayer]) -> T:
    """Overlay `layers` on `base`, a frozen dataclass tree, later layers winning. Raises
    ConfigError."""
    problems: list[str] = []
    result = overlay(base, layers, problems)
    if problems:
        raise ConfigError(problems)
    return result


def overlay(base: T, layers: Sequence[ConfigLayer], problems: list[str]) -> T:
    """Variant of `read_config` that adds what is wrong to `problems`, and keeps `base` there."""
    kinds = {path: kind for path, _, _, kind in walk(base)}
    sections = {path[:end] for path in kinds for end, dot in enumerate(path) if dot == "."}
    values: dict[str, Any] = {}
    for layer in layers:
        problems.extend(layer.problems)
        for path, value in _entries(layer.values, sections):
            if path in RETIRED:
                problems.extend(_retired(path, value, layer))
            elif path in sections:
                one = next(known for known in kinds if known.startswith(path + "."))
                problems.append(
                    f"{layer.place(path)}: this is a section; set one of its keys, such as "
                    f"{layer.place(one)}"
                )
            elif path not in kinds:
                problems.append(_unknown(path, value, layer, [*kinds, *layer.others]))
            else:
                try:
                    values[path] = convert(value, kinds[path], from_text=layer.text)
                except ValueProblem as problem:
                    problems.append(f"{layer.place(path)}: {problem}")
    return _rebuild(base, "", values, problems, layers)


def walk(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """Yields dotted path, section, field and type of all leaves of a dataclass tree, in order of
    declaration."""
    kinds = resolved_types(type(section))
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), prefix + field.name
        if is_section(value):
            yield from walk(value, path + ".")
        else:
            yield path, section, field, kinds[field.name]


def _entries(
    given: Mapping[str, Any], sections: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the values of a layer, nested in `sections` or not, by their dotted paths."""
    for key, value in given.items():
        path = prefix + key.replace("-", "_")
        if path in sections and isinstance(value, Mapping):
            yield from _entries(value, sections, path + ".")
        else:
            yield path, value


def _dotted(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys with dots: in a file two of them could give one value twice."""
    waiting = [given]  # a file may be nested deeply
    while waiting:
        for key, value in waiting.pop().items():
            if "." in key:
                yield key
            elif isinstance(value, Mapping):
                waiting.append(value)


def _retired(path: str, value: Any, layer: ConfigLayer) -> list[str]:
    """Reports an option of earlier versions: files may name it still."""
    silent, why = RETIRED[path]
    told = f"{layer.place(path)}: no longer an option, {why}"
    if layer.text:
        return [told]
    if value != silent:
        warnings.warn(f"{told}: {value!r} is left out", PackgraphWarning, stacklevel=2)
    return []


def _unknown(path: str, value: Any, layer: ConfigLayer, known: Sequence[str]) -> str:
    """Reports an unknown key, or an unknown section of a file once."""
    if not isinstance(value, Mapping):
        near = nearest(path[:LONGEST_NAME], known)
        shown = f"--{near.replace('_', '-')}" if layer.text else near
        return f"{layer.place(path)}: unknown key, did you mean {shown}?"
    sections = sorted({candidate.rpartition(".")[0] for candidate in known} - {""})
    near = max(sections, key=lambda section: _likeness(path, section), default="")
    return f"{layer.place(path)}: unknown section" + (f", did you mean {near}?" if near else "")


def nearest(path: str, known: Sequence[str]) -> str:
    """The known path most like `path`: one with the same last word, with its initials (`lr`), or
    else spelled alike."""

    def likeness(candidate: str) -> tuple[bool, bool, float]:
        last, wanted = candidate.rpartition(".")[2], path.rpartition(".")[2]
        initials = "".join(part[0] for part in last.split("_") if part)
        spelling = max(_likeness(path, candidate), 0.9 * _likeness(wanted, last))
        return last == wanted, len(wanted) > 1 and initials == wanted, spelling

    return max(known, key=likeness)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def _rebuild(
    section: T,
    prefix: str,
    values: Mapping[str, Any],
    problems: list[str],
    layers: Sequence[ConfigLayer],
) -> T:
    """A copy of `section` with `values` put in; a dataclass that refuses them adds its reason to
    `problems`."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        path = prefix + field.name
        if is_section(value):
            changes[field.name] = _rebuild(value, path + ".", values, problems, layers)
        elif path in values:
            changes[field.name] = values[path]
    try:
        return dataclasses.replace(section, **changes)  # type: ignore[type-var]
    except ValueError as error:
        name = prefix.partition(".")[0]
        files = [
            layer.where
            for layer in layers
            if not layer.text and any(key.partition(".")[0] == name for key in layer.values)
        ]
        of = f" (values of {', '.join(files)})" if files else ""
        problems.append(f"section {prefix[:-1]}: {error}{of}" if prefix else str(error))
        return section


def to_dict(section: Any) -> dict[str, Any]:
    """The tree as JSON-able values; `read_config(base, [Layer(..., to_dict(config))])` gives the
    same tree back."""
    return {
        field.name: to_dict(value) if is_section(value) else plain(value)
        for field in dataclasses.fields(section)
        for value in (getattr(section, field.name),)
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted paths at which two `to_dict` trees differ → (old value, new value)."""
    before, after = flat(old), flat(new)
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def _parse_yaml(text: str) -> Any:
    """The values of a YAML file. Numbers such as 2e-4, which YAML 1.1 takes for text, are numbers.

    Raises:
        ValueError: If it is not valid, or PyYAML is not installed.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ValueError("reading it needs PyYAML: pip install pyyaml") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML's, whose numbers with an exponent need no point, and whose keys are there once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            """The values of a mapping by name."""
            once([(str(key.value), value) for key, value in node.value])
            found = super().construct_mapping(node, deep)
            return {str(name): value for name, value in found.items()}

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def load_file(path: Path) -> ConfigLayer:
    """A `.toml`, `.json` or `.yaml` file as a layer. Raises ConfigError naming the file when it is
    missing or malformed.

    The checksum of a run's config.json is left out: a copy of it may be edited.
    """
    named = str(path) if len(path.name) <= LONGEST_NAME else shown(str(path))
    if path.suffix not in (".toml", ".json", ".yaml", ".yml"):
        raise ConfigError([f"{named}: a config file ends in .toml, .json, .yaml or .yml"])
    kind, problem = path.suffix[1:].upper(), path_problem(str(path))
    if problem is None and path.exists() and not path.is_file():  # a pipe would be waited for
        problem = "it is no file"
    if problem is not None:
        raise ConfigError([f"{named}: cannot be read: {problem}"])
    try:
        text = path.read_text(encoding="utf-8")
        reads: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
        values = reads.get(path.suffix, _parse_yaml)(text)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (ValueError, RecursionError) as error:  # also TOMLDecodeError, JSONDecodeError
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError([f"{path}: not valid {kind}: {what}"]) from error
    if not isinstance(values, dict):
        raise ConfigError(
            [f"{path}: the top level must be an object with the sections of the configuration"]
        )
    return ConfigLayer(
        str(path),
        {key: value for key, value in values.items() if key != CHECKSUM},
        problems=tuple(
            f"{path}: {key!r}: a file nests its sections; no key has dots"
            for key in _dotted(values)
        ),
    )
