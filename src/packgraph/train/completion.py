"""Shell completion: a static script from the options of all commands, for bash, zsh and fish.

The script holds everything, so that a key pressed in a shell does not wait for Python and torch.
"""

from collections.abc import Iterator, Mapping, Sequence

from packgraph.train.command_line import Leaf
from packgraph.train.config_values import choices_of

BASH = """\
# Completion of packgraph for {shell}, printed by `packgraph completion {shell}`.
{head}_packgraph() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} options="" arguments="" values=""
    COMPREPLY=()
    (( COMP_CWORD == 1 )) && command=""
    [[ $command == bench ]] && (( COMP_CWORD > 2 )) && command="bench ${{COMP_WORDS[2]}}"
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
        options: Options of each command, such as `train` or `bench step`.
        arguments: Words that may follow each command; those of "" are the commands.

    Returns:
        The script.
    """
    if shell == "fish":
        return "\n".join(_fish(options, arguments)) + "\n"
    commands = [
        f'        "{name}") options="{" ".join(_names(options.get(name, ())))}"; '
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


def _names(leaves: Sequence[Leaf]) -> list[str]:
    return [leaf.option for leaf in leaves if not leaf.positional]


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
