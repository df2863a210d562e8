"""The command `packgraph`: train, try, verify, plan, data, export, chat, eval, presets,
recipes, completion.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import packgraph
from packgraph.graphs.errors import CaptureError
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.config.commands import USAGE
from packgraph.train.config.reading import ConfigError, printable, shown, text_problem
from packgraph.train.run_files import RunFileError

USER_ERROR = 2
FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
MOST_PROBLEMS = 8
LONGEST_WORD = 4000  # characters of an argument
MISSING = {
    "torch": packgraph.NO_TORCH,
    "fcntl": "this system has no POSIX locks of files; on Windows, install packgraph in WSL",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # torch reads it as it is loaded. Where a rank is lost the others say so themselves; its
    # warnings of broken connections are many lines of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        if words and words[0] in COMMANDS:
            code = _run(words[0], words[1:])
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
        lines = (f"  {usage:16} {summary}" for usage, summary in COMMANDS.values())
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


def _run(name: str, words: list[str]) -> int:
    """Run a command; turn what a user can cause into one block of text and an exit code."""
    try:
        _check_words(words)
        found = _imported(f"{READERS}:read_{name}")(words)
    except (ConfigError, OSError) as error:
        return _explain(error, "error", USER_ERROR)
    if isinstance(found, int):  # all is said
        return found
    for package, told in MISSING.items():
        if find_spec(package) is None:
            print(f"packgraph: error: {told}", file=sys.stderr)
            return USER_ERROR
    run = _imported(found.place)
    kinds = _user_errors()
    try:
        return int(run(*found.arguments))
    except tuple(kinds) as error:
        return _explain(error, *next(how for kind, how in kinds.items() if isinstance(error, kind)))


def _imported(place: str) -> Callable[..., Any]:
    """The function at `place`, module:name."""
    module, _, name = place.partition(":")
    with _long_imports():
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _user_errors() -> dict[type[Exception], tuple[str, int]]:
    """Errors that commands raise for their users: how each is called, and the exit code. They are
    imported once what raises them is."""
    from packgraph.models.hf import WeightsError
    from packgraph.parallel.heartbeat import LOST, LostRankError
    from packgraph.parallel.ranks import LaunchError, LostPartnersError
    from packgraph.train.config.reading import ConfigError
    from packgraph.train.data import DataError
    from packgraph.train.spikes import NonFiniteLossError, SpikeError

    wrong = ConfigError, DataError, CheckpointError, CaptureError, RunFileError, WeightsError
    found = dict.fromkeys((*wrong, LaunchError, OSError), ("error", USER_ERROR))
    found |= dict.fromkeys((NonFiniteLossError, SpikeError), ("training failed", FAILED))
    return found | {LostPartnersError: ("error", FAILED), LostRankError: ("error", LOST)}


def _explain(error: Exception, what: str, code: int) -> int:
    """Say what went wrong; returns the exit code."""
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


READERS = "packgraph.commands"  # has a function read_NAME for each
# Usage and summary of each.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "train": ("train PRESET", "train a model, for example: packgraph train qwen3-tiny"),
    "try": ("try PRESET", "is it faster for me: eager, compiled, graphs, by turns"),
    "verify": (
        "verify [PRESET]",
        "check that graph and eager training agree bit by bit",
    ),
    "plan": (
        "plan [DATA]",
        "draw a pipeline schedule, or choose buckets for DATA",
    ),
    "data": (
        "data build|check",
        "tokenize documents once into memory-mapped shards",
    ),
    "export": (
        "export RUN DIR",
        "write a run's newest checkpoint as Hugging Face weights",
    ),
    "chat": ("chat RUN", "try what a run has trained"),
    "eval": ("eval RUN", "score what a run has trained on benchmarks, by lm-eval"),
    "presets": ("presets", "list the presets"),
    "recipes": ("recipes", "list whole runs of known models: train RECIPE"),
    "completion": (
        "completion SHELL",
        "print a completion script for bash, zsh or fish",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
