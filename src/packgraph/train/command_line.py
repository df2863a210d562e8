"""Dotted options: every leaf of a configuration is an option, with its type, default and help.

    --optimizer.learning-rate 1e-3   --graph.capacities "512x32,256x16"   --graph.strict
    --graph.max-documents

The invariant: an option is either taken as an override of a known leaf, or left to the command
itself, or reported with the nearest known option; no value is ever mistaken for a preset's name.
"""

import dataclasses
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from packgraph.train.config import ConfigError, ConfigLayer, known_paths
from packgraph.train.config_values import (
    FALSE_WORDS,
    TRUE_WORDS,
    ValueProblem,
    convert,
    describe,
    is_section,
    render,
    resolved_types,
    shown,
)
from packgraph.train.options import field_help

WHERE = "command line"
DEEPEST = 8  # dots in an option; no section lies so deep
WIDTH = 110  # columns of help
# What most runs need, for `--help` without `all`.
COMMON = (
    "data.source",
    "data.path",
    "data.tokenizer",
    "optimizer.learning_rate",
    "graph.scope",
    "graph.granularity",
    "graph.compile",
    "graph.capacities",
    "offload.modules",
    "offload.budget",
    "parallel.dp",
    "parallel.tp",
    "parallel.pp",
    "run.name",
    "run.steps",
    "run.seed",
    "run.init_from",
    "run.device",
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a configuration tree. bare: text that the option means when given without a
    value, or None."""

    path: str
    kind: Any
    default: Any
    help: str
    bare: str | None

    @property
    def option(self) -> str:
        return "--" + self.path.replace("_", "-")


def leaves(section: Any, prefix: str = "") -> Iterator[Leaf]:
    """All leaves in order of declaration; defaults are the values in `section`."""
    kinds = resolved_types(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if is_section(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            bare = "true" if kinds[field.name] is bool else field.metadata.get("bare")
            text = field.metadata.get("help") or field_help(type(section), field.name)
            yield Leaf(prefix + field.name, kinds[field.name], value, text, bare)


def split_overrides(
    arguments: Sequence[str], base: Any, own_options: Collection[str]
) -> tuple[ConfigLayer, list[str]]:
    """The overrides among `arguments` as a layer, and what is left for the command.

    own_options: options of the command itself, such as `--config`; they and their values are left
    alone.
    """
    known = {leaf.path: leaf for leaf in leaves(base)}
    values: dict[str, Any] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, has_value, value = word.partition("=")
        if not word.startswith("--") or word == "--" or name in own_options:
            rest.append(word)
            if (
                name in own_options
                and not has_value
                and waiting
                and not waiting[0].startswith("--")
            ):
                rest.append(waiting.pop(0))
            continue
        path = name[2:].replace("-", "_")
        if path.count(".") > DEEPEST:
            raise ConfigError(
                [f"{shown(name)}: unknown key; the deepest are like --model.latent.scaling.factor"]
            )
        if path.startswith("no_") and path[3:] in known and known[path[3:]].kind is bool:
            _put(values, path[3:], "false")
            continue
        leaf = known.get(path)
        if not has_value:
            value = _take_value(leaf, waiting)
        _put(values, path, value)
    return ConfigLayer(WHERE, values, text=True), rest


def _take_value(leaf: Leaf | None, waiting: list[str]) -> str:
    """The value that follows an option; an option with a meaning of its own takes the next word
    only if it fits."""
    if leaf is None or leaf.bare is None:
        return waiting.pop(0) if waiting and not waiting[0].startswith("--") else ""
    if waiting and _fits(waiting[0], leaf):
        return waiting.pop(0)
    return leaf.bare


def _fits(word: str, leaf: Leaf) -> bool:
    if leaf.kind is bool:
        return word.lower() in TRUE_WORDS + FALSE_WORDS
    try:
        convert(word, leaf.kind, from_text=True)
    except ValueProblem:
        return False
    return True


def _put(values: dict[str, Any], path: str, value: str) -> None:
    """Set a dotted path in a nested dict; a scalar in the way gives way to the section."""
    *sections, last = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[last] = value


def dotted(values: Mapping[str, Any], prefix: str = "") -> frozenset[str]:
    """The dotted paths of all leaves of a layer's values."""
    return frozenset(
        path
        for key, value in values.items()
        for path in (
            dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else (prefix + key,)
        )
    )


def options_help(base: Any, only: Collection[str] | None = None) -> str:
    """All options, a section at a time: `--option TYPE`, then help and default.

    only: paths of the options that are shown, with one line of help each; None = all.
    """
    lines: list[str] = []
    section = None
    for leaf in leaves(base):
        if only is not None and leaf.path not in only:
            continue
        if leaf.path.rpartition(".")[0] != section:
            section = leaf.path.rpartition(".")[0]
            lines += ["", f"{section or 'run as a whole'}:"]
        value = f"[{describe(leaf.kind)}]" if leaf.bare is not None else describe(leaf.kind)
        lines.append(f"  {leaf.option} {value}")
        default, indent = f"(default: {render(leaf.default)})", " " * 6
        if only is None:
            text = f"{leaf.help} {default}".lstrip()
            lines.append(
                textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
            )
        else:
            lines[-1] += f" {default}"
            first = leaf.help.partition("; ")[0]
            lines.append(indent + textwrap.shorten(first, WIDTH - len(indent), placeholder=" …"))
    return "\n".join(lines)


def all_options(base: Any) -> list[str]:
    """All option names, for completion and tests."""
    return ["--" + path.replace("_", "-") for path in known_paths(base)]
