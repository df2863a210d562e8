"""The command `packgraph`: train, try, verify, plan, data, export, chat, presets, completion.

Whatever a user can get wrong ends as one clear block on stderr and exit code 2; a run that fails
(the loss is no number, a verification differs) ends with 1; a run that was told to stop saves and
ends with 128 + the signal's number, or 75 at its time limit (train/signals.py). A traceback is
shown for our bugs only.
"""

import contextlib
import difflib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import packgraph
from packgraph.train.config.commands import USAGE
from packgraph.train.config.reading import printable, shown, text_problem

USER_ERROR = 2
FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
MOST_PROBLEMS = 8
LONGEST_WORD = 4000  # characters of an argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # torch reads it as it is loaded. Where a rank is lost the others say so themselves; its
    # warnings of broken connections are many lines of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        if words and words[0] in COMMANDS:
            code = _run(COMMANDS[words[0]].run, words[1:])
        else:
            code = _top_level(words)
        sys.stdout.flush()
    except KeyboardInterrupt:  # also while torch is imported, which takes seconds
        print("packgraph: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has had enough (`packgraph train --help | head`). Python would complain once
        # more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


@contextlib.contextmanager
def _long_imports() -> Iterator[None]:
    """Around imports that take seconds. Raises KeyboardInterrupt for a Ctrl-C meanwhile, also for
    one that got lost.

    An exception that Python raises in a callback of the import system is printed or dropped, never
    passed on. Garbage is not collected meanwhile: modules leave hardly any, and looking for it in
    all that they make takes a twentieth of the time.
    """
    pressed = []

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before, collects = signal.signal(signal.SIGINT, note), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if collects:
            gc.enable()
    if pressed:
        raise KeyboardInterrupt


def _top_level(words: list[str]) -> int:
    """Help, the version, or what is wrong with the name of a command."""
    word = words[0] if words else "--help"
    if word in ("-h", "--help"):
        lines = (f"  {one.usage:16} {one.summary}" for one in COMMANDS.values())
        print(USAGE.format(commands="\n".join(lines)))
        return 0
    if word == "--version":
        print(f"packgraph {packgraph.__version__}")
        return 0
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    meant = f", did you mean {near[0]}?" if near else f". Known: {', '.join(COMMANDS)};"
    print(
        f"packgraph: error: no command {shown(word)}{meant} `packgraph --help` explains all",
        file=sys.stderr,
    )
    return USER_ERROR


def _run(place: str, words: list[str]) -> int:
    """Run the command at `place` (module:function); turn what a user can cause into one block of
    text and an exit code."""
    module, _, name = place.partition(":")
    with _long_imports():
        command = getattr(importlib.import_module(module), name)
    try:
        _check_words(words)
        return int(command(words))
    except tuple(_user_errors()) as error:
        return _explain(error)


def _user_errors() -> dict[type[Exception], tuple[str, int]]:
    """Errors that commands raise for their users: how each is called, and the exit code."""
    from packgraph.graphs.errors import CaptureError
    from packgraph.models.hf import WeightsError
    from packgraph.parallel.heartbeat import LOST, LostRankError
    from packgraph.parallel.ranks import LaunchError, LostPartnersError
    from packgraph.train.checkpoint.reader import CheckpointError
    from packgraph.train.config.reading import ConfigError
    from packgraph.train.data import DataError
    from packgraph.train.run_files import RunFileError
    from packgraph.train.spikes import NonFiniteLossError, SpikeError

    wrong = ConfigError, DataError, CheckpointError, CaptureError, RunFileError, WeightsError
    found = dict.fromkeys((*wrong, LaunchError, OSError), ("error", USER_ERROR))
    found |= dict.fromkeys((NonFiniteLossError, SpikeError), ("training failed", FAILED))
    return found | {LostPartnersError: ("error", FAILED), LostRankError: ("error", LOST)}


def _explain(error: Exception) -> int:
    """Say what went wrong; returns the exit code."""
    what, code = next(how for kind, how in _user_errors().items() if isinstance(error, kind))
    text = str(error)
    if isinstance(error, OSError):  # of a file that nobody has expected to fail
        if error.filename is None or isinstance(error, BrokenPipeError):
            raise error
        text = f"{os.fspath(error.filename)}: {error.strerror}; see that it can be read and written"
    print(printable(f"packgraph: {what}: {text}"), file=sys.stderr, flush=True)
    if code not in (USER_ERROR, FAILED):
        os._exit(code)  # process groups that are freed would wait for the rank that is lost
    return code


def _check_words(words: list[str]) -> None:
    """Raise ConfigError for an argument that is no text, or longer than any value."""
    from packgraph.train.config.reading import ConfigError

    problems = []
    for number, word in enumerate(words, start=1):
        problem = text_problem(word)
        if len(word) > LONGEST_WORD:
            problem = f"longer than {LONGEST_WORD:,} characters"
        if problem is not None:
            before = words[number - 2] if number > 1 else ""
            place = (
                f", after {shown(before)}" if before.startswith("--") and "=" not in before else ""
            )
            problems.append(f"argument {number}, {shown(word)}{place}: {problem}")
    if problems:
        raise ConfigError(problems[:MOST_PROBLEMS])


class Command(NamedTuple):
    """One command: the module and function that run it, and its line in the help of all."""

    run: str
    usage: str
    summary: str


OWN = "packgraph.commands"
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        f"{OWN}:train", "train PRESET", "train a model, for example: packgraph train qwen3-tiny"
    ),
    "try": Command(
        f"{OWN}:try_out", "try PRESET", "is it faster for me: eager, compiled, graphs, by turns"
    ),
    "verify": Command(
        f"{OWN}:verify",
        "verify [PRESET]",
        "check that graph and eager training agree bit by bit",
    ),
    "plan": Command(
        f"{OWN}:plan",
        "plan [DATA]",
        "draw a pipeline schedule, or choose buckets for the lengths of DATA",
    ),
    "data": Command(
        "packgraph.train.data.shard_build:data_command",
        "data build|check",
        "tokenize documents once into memory-mapped shards",
    ),
    "export": Command(
        f"{OWN}:export",
        "export RUN DIR",
        "write a run's newest checkpoint as Hugging Face weights",
    ),
    "chat": Command(
        "packgraph.train.export:chat_command", "chat RUN", "try what a run has trained"
    ),
    "presets": Command(f"{OWN}:presets", "presets", "list the presets"),
    "completion": Command(
        f"{OWN}:completion",
        "completion SHELL",
        "print a completion script for bash, zsh or fish",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
