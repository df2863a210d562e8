"""Words of a command as dataclasses: every leaf is an option, with its type, default and help.

    --optimizer.learning-rate 1e-3   --graph.capacities "512x32,256x16"   --graph.strict
    --graph.max-documents

A command has options of its own, the fields of one dataclass (`option`), and may take those of a
configuration too. The invariant: a word is either the value of a known option, or an argument by
its place, or reported, an unknown option with the nearest known one; no value is ever mistaken for
the name of a preset.

`completion_script` is static, for bash, zsh and fish: it holds everything, so that a key pressed in
a shell does not wait for Python and torch.
"""

import dataclasses
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin

from packgraph.train.config.reading import (
    ConfigError,
    ConfigLayer,
    ValueProblem,
    choices_of,
    convert,
    describe,
    overlay,
    render,
    shown,
    walk,
)
from packgraph.train.config.sections import field_help

T = TypeVar("T")
WHERE = "command line"
WIDTH = 100  # columns of help
# What most runs need, for `--help` without `all`.
COMMON = (
    "data.source",
    "data.path",
    "data.tokenizer",
    "eval.every",
    "eval.share",
    "optimizer.learning_rate",
    "graph.granularity",
    "graph.compile",
    "graph.capacities",
    "offload.modules",
    "offload.budget",
    "parallel.tp",
    "parallel.pp",
    "run.name",
    "run.steps",
    "run.tokens_per_step",
    "run.checkpoint_every",
    "run.seed",
    "run.init_from",
    "run.device",
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a configuration tree or of a command's own options.

    bare: text that the option means when given without a value, or None. metavar: what stands for
    its value in help. own: it is an option of a command. positional: it is given by its place.
    """

    path: str
    kind: Any
    default: Any
    help: str
    bare: str | None
    metavar: str
    own: bool = False
    positional: bool = False
    required: bool = False

    @property
    def option(self) -> str:
        return self.path.upper() if self.positional else "--" + self.path.replace("_", "-")

    @property
    def head(self) -> str:
        """The option with what follows it."""
        if self.positional or (self.own and self.kind is bool) or not self.metavar:
            return self.option
        return f"{self.option} {self.metavar if self.bare is None else f'[{self.metavar}]'}"

    @property
    def default_text(self) -> str:
        """The default as help shows it; that an own option does nothing is not said."""
        if self.required:
            return "(required)"
        if self.own and (self.default in (None, False, ()) or self.path == "help"):
            return ""
        text = render(self.default)
        spaced = self.own and "," not in self.metavar  # where options take several words
        return f"(default: {text.replace(',', ' ') if spaced else text})"


def leaves(section: Any) -> Iterator[Leaf]:
    """All leaves in order of declaration; defaults are the values in `section`."""
    for path, owner, field, kind in walk(section):
        more, own = field.metadata, "help" in field.metadata
        yield Leaf(
            path,
            kind,
            getattr(owner, field.name),
            more["help"].format(own=owner) if own else field_help(type(owner), field.name),
            "true" if kind is bool or bool in get_args(kind) else more.get("bare"),
            more.get("metavar", describe(kind).removesuffix(" or none" if own else "")),
            own,
            more.get("positional", False),
            more.get("required", False),
        )


class ParsedArguments(NamedTuple, Generic[T]):
    """Options read from the words of a command.

    own: options of the command itself. given: which of them were given. overrides: those of a
    configuration, with everything that was wrong so far.
    """

    own: T
    given: frozenset[str]
    overrides: ConfigLayer


def parse_arguments(words: Sequence[str], own: T, base: Any = None) -> ParsedArguments[T]:
    """Sort `words` into options of the command and overrides of `base`.

    Args:
        words: Of the command line, without the command's name.
        own: Options of the command, with their defaults.
        base: Configuration whose leaves are options, too; None = there is none.

    Returns:
        Both. Problems of own options are in `overrides`, for `read_config` to raise them with those
        of values.

    Raises:
        ConfigError: Without a base, everything that is wrong.
    """
    mine = {leaf.path: leaf for leaf in leaves(own)}
    known = ({} if base is None else {leaf.path: leaf for leaf in leaves(base)}) | mine
    free = [path for path, leaf in mine.items() if leaf.positional]
    own_values: dict[str, Any] = {}
    others: dict[str, Any] = {} if base is not None else own_values
    problems: list[str] = []
    waiting, several = list(words), not free
    while waiting:
        word = waiting.pop(0)
        name, has_value, value = ("--help" if word == "-h" else word).partition("=")
        path = name[2:].replace("-", "_")
        if not name.startswith("--") or word == "--":
            if free:
                own_values[free.pop(0)] = word
            else:
                problems.append(f"{shown(word)}: not expected here; see --help")
            continue
        leaf = known.get(path)
        if path.startswith("no_") and path[3:] in known and known[path[3:]].kind is bool:
            path, value = path[3:], "false"
        elif not has_value:
            taken = _take_value(leaf, waiting, several)
            if taken is None and leaf is not None:
                problems.append(f"{leaf.option}: expected {describe(leaf.kind)}, got no value")
                continue
            value = taken or ""
        (own_values if path in mine else others)[path] = value
    if "help" not in own_values:
        problems += [
            f"{leaf.option}: required"
            for leaf in mine.values()
            if leaf.required and leaf.path not in own_values
        ]
    positional = frozenset(path for path, leaf in mine.items() if leaf.positional)
    layer = ConfigLayer(WHERE, own_values, text=True, positional=positional)
    result = overlay(own, [layer], problems)
    if base is None and problems:
        raise ConfigError(problems)
    named = tuple(path for path in mine if path not in positional)
    overrides = {} if base is None else others
    return ParsedArguments(
        result,
        frozenset(own_values),
        ConfigLayer(WHERE, overrides, text=True, problems=tuple(problems), others=named),
    )


def _take_value(leaf: Leaf | None, waiting: list[str], several: bool) -> str | None:
    """The value that follows an option, None if there is none. An option with a meaning of its own
    takes the next word only if it fits.

    several: an option of many values takes all words up to the next option.
    """
    if leaf is not None and leaf.bare is not None:
        return waiting.pop(0) if waiting and _fits(waiting[0], leaf) else leaf.bare
    kinds = () if leaf is None else (leaf.kind, *get_args(leaf.kind))
    many = several and any(get_origin(kind) is tuple for kind in kinds)
    taken: list[str] = []
    while waiting and not waiting[0].startswith("--") and (many or not taken):
        taken.append(waiting.pop(0))
    return ",".join(taken) if taken else None


def _fits(word: str, leaf: Leaf) -> bool:
    try:
        convert(word, leaf.kind, from_text=True)
    except ValueProblem:
        return False
    return True


def options_help(base: Any, only: Collection[str] | None = None) -> str:
    """All options, a section at a time: `--option TYPE`, then help and default.

    only: paths of the options that are shown, with one line of help each; None = all.
    """
    lines: list[str] = []
    section = None
    indent = " " * 6
    for leaf in sorted(leaves(base), key=lambda leaf: leaf.path == "help"):
        if only is not None and leaf.path not in only:
            continue
        if leaf.path.rpartition(".")[0] != section:
            section = leaf.path.rpartition(".")[0]
            lines += ["", f"{section or ('options' if leaf.own else 'run as a whole')}:"]
        if only is not None:
            lines.append(f"  {leaf.head} {leaf.default_text}".rstrip())
            first = leaf.help.partition("; ")[0]
            lines.append(indent + textwrap.shorten(first, WIDTH - len(indent), placeholder=" …"))
            continue
        lines.append(_filled(leaf.head, "  ", indent))
        if text := f"{leaf.help} {leaf.default_text}".strip():
            lines.append(_filled(text, indent, indent))
    return "\n".join(lines)


def _filled(text: str, first: str, further: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def all_options(base: Any) -> list[str]:
    """All option names."""
    return ["--" + path.replace("_", "-") for path, *_ in walk(base)]


BASH = """\
# Completion of packgraph for {shell}, printed by `packgraph completion {shell}`.
{head}_packgraph() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} options="" arguments="" values=""
    COMPREPLY=()
    (( COMP_CWORD == 1 )) && command=""
    case $command in
{commands}
    esac
    case $command$before in
{values}
    esac
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [[ -n $values || $before != --* ]]; then
        COMPREPLY=($(compgen -W "${{values:-$arguments}}" -- "$current"))
    fi
}}
complete -o default -F _packgraph packgraph
"""
ZSH_HEAD = """\
#compdef packgraph
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(
    shell: str, options: Mapping[str, Sequence[Leaf]], arguments: Mapping[str, Sequence[str]]
) -> str:
    """The text that a shell reads.

    Args:
        shell: `bash`, `zsh` or `fish`.
        options: Options of each command, such as `train` or `plan memory`.
        arguments: Words that may follow each command; those of "" are the commands.

    Returns:
        The script.
    """
    if shell == "fish":
        return "\n".join(_fish(options, arguments)) + "\n"
    named = {
        name: " ".join(leaf.option for leaf in leaves if not leaf.positional)
        for name, leaves in options.items()
    }
    commands = [
        f'        "{name}") options="{named.get(name, "")}"; '
        f'arguments="{" ".join(arguments.get(name, ()))}" ;;'
        for name in sorted({*options, *arguments})
    ]
    patterns: dict[str, list[str]] = {}
    for name, leaves in options.items():
        for leaf in leaves:
            if words := " ".join(choices_of(leaf.kind)):
                patterns.setdefault(words, []).append(f'"{name}{leaf.option}"')
    values = [f'        {"|".join(all_)}) values="{words}" ;;' for words, all_ in patterns.items()]
    head = ZSH_HEAD if shell == "zsh" else ""
    script = BASH.format(
        shell=shell, head=head, commands="\n".join(commands), values="\n".join(values)
    )
    # compinit looks for #compdef in the first line alone.
    return head + script.replace(head, "", 1) if head else script


def _fish(
    options: Mapping[str, Sequence[Leaf]], arguments: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    yield "# Completion of packgraph for fish, printed by `packgraph completion fish`."
    yield "complete -c packgraph -f"
    for name, words in arguments.items():
        when = _seen(name) if name else "__fish_use_subcommand"
        yield f"complete -c packgraph -n '{when}' -a '{' '.join(words)}'"
    for name, leaves in options.items():
        for leaf in leaves:
            if leaf.positional:
                continue
            words = " ".join(choices_of(leaf.kind))
            value = "" if leaf.bare is not None else f" -x -a '{words}'" if words else " -r -F"
            text = leaf.help.partition("; ")[0].replace("\\", "\\\\").replace("'", "\\'")
            long = leaf.option.removeprefix("--")
            yield f"complete -c packgraph -n '{_seen(name)}' -l {long}{value} -d '{text}'"


def _seen(name: str) -> str:
    return "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
