"""Reading nested frozen dataclasses from files and the command line.

The problem: a run is described by a tree of small frozen dataclasses. Its values come from a
preset, then a TOML or JSON file, then `--dotted.options`. One typo must not cost a started run, and
ten typos must not cost ten attempts.

The invariant: either every value given is known, well typed and accepted by its dataclass, or one
`ConfigError` lists all problems at once, each with its place (file and key, or option) and, for an
unknown key, the nearest known one. `to_dict` is the inverse of `read_config`: what it writes reads
back equal.

    preset ─▶ Layer(file, {...}) ─▶ Layer(option, {...}) ─▶ typed values ─▶ frozen dataclass
"""

import dataclasses
import difflib
import tomllib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from packgraph.graphs.errors import PackgraphWarning
from packgraph.train.config.values import (
    SHOWN,
    ValueProblem,
    convert,
    flat,
    is_section,
    path_problem,
    plain,
    resolved_types,
    shown,
)
from packgraph.train.run_files import CHECKSUM, parse_json

T = TypeVar("T")
LONGEST_NAME = 255  # of a file; what is longer is none, and is shown in part


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


def load_file(path: Path) -> ConfigLayer:
    """A `.toml` or `.json` file as a layer. Raises ConfigError naming the file when it is missing
    or malformed.

    The checksum of a run's config.json is left out: a copy of it may be edited.
    """
    named = str(path) if len(path.name) <= LONGEST_NAME else shown(str(path))
    if path.suffix not in (".toml", ".json"):
        raise ConfigError([f"{named}: a config file ends in .toml or .json"])
    kind, problem = path.suffix[1:].upper(), path_problem(str(path))
    if problem is None and path.exists() and not path.is_file():  # a pipe would be waited for
        problem = "it is no file"
    if problem is not None:
        raise ConfigError([f"{named}: cannot be read: {problem}"])
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (ValueError, RecursionError) as error:  # also TOMLDecodeError, JSONDecodeError
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError([f"{path}: not valid {kind}: {what}"]) from error
    if not isinstance(values, dict):
        raise ConfigError(
            [f"{path}: the top level must be an object with the sections of the configuration"]
        )
    return ConfigLayer(str(path), {key: value for key, value in values.items() if key != CHECKSUM})
