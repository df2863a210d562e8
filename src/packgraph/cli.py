"""The command `packgraph`: train, verify, plan, data, bench, export, chat, presets, completion.

Whatever a user can get wrong ends as one clear block on stderr and exit code 2; a run that fails
(the loss is no number, a verification differs) ends with 1; a run that was told to stop saves and
ends with 128 + the signal's number, or 75 at its time limit (train/signals.py). A traceback is
shown for our bugs only.
"""

import contextlib
import dataclasses
import difflib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packgraph.train.config.commands import (
    COMPLETION_USAGE,
    EXPORT_USAGE,
    PLAN_USAGE,
    TRAIN_END,
    TRAIN_USAGE,
    USAGE,
    VERIFY_USAGE,
    CompletionArguments,
    ExportArguments,
    ScheduleArguments,
    TrainArguments,
    VerifyArguments,
)
from packgraph.train.config.values import CommandArguments, printable, shown, text_problem

USER_ERROR = 2
FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
MOST_PROBLEMS = 8
MOST_ACTIONS = 100_000  # of a schedule that is drawn
LONGEST_WORD = 4000  # characters of an argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # torch reads it as it is loaded. Where a rank is lost the others say so themselves; its
    # warnings of broken connections are many lines of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        if words and words[0] in COMMANDS:
            code = _with_clear_errors(COMMANDS[words[0]].run, words[1:])
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
        print(f"packgraph {_version()}")
        return 0
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    meant = f", did you mean {near[0]}?" if near else f". Known: {', '.join(COMMANDS)};"
    print(
        f"packgraph: error: no command {shown(word)}{meant} `packgraph --help` explains all",
        file=sys.stderr,
    )
    return USER_ERROR


def _version() -> str:
    try:
        return metadata.version("packgraph")
    except metadata.PackageNotFoundError:
        return "(not installed, run from its source folder)"


def _with_clear_errors(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a command; turn what a user can cause into one block of text and an exit code."""
    with _long_imports():
        from packgraph.train.config.reading import ConfigError

    try:
        _check_words(words)
        return int(command(words))
    except ConfigError as error:
        print(printable(f"packgraph: error: {error}"), file=sys.stderr)
        return USER_ERROR
    except _other_errors() as error:
        return _explain(error)
    except OSError as error:  # of a file that nobody has expected to fail
        if error.filename is None or isinstance(error, BrokenPipeError):
            raise
        text = f"{os.fspath(error.filename)}: {error.strerror}; see that it can be read and written"
        print(printable(f"packgraph: error: {text}"), file=sys.stderr)
        return USER_ERROR


def _other_errors() -> tuple[type[Exception], ...]:
    """Errors that commands raise for their users, imported only once something was raised."""
    from packgraph.graphs.errors import CaptureError
    from packgraph.models.hf import WeightsError
    from packgraph.parallel.heartbeat import LostRankError
    from packgraph.parallel.ranks import LaunchError, LostPartnersError
    from packgraph.train.checkpoint.reader import CheckpointError
    from packgraph.train.data import DataError
    from packgraph.train.run_files import RunFileError
    from packgraph.train.spikes import NonFiniteLossError, SpikeError

    wrong = (DataError, CheckpointError, CaptureError, RunFileError, WeightsError, LaunchError)
    return (*wrong, NonFiniteLossError, SpikeError, LostPartnersError, LostRankError)


def _explain(error: Exception) -> int:
    """Say what went wrong; returns the exit code."""
    from packgraph.parallel.heartbeat import LOST, LostRankError
    from packgraph.parallel.ranks import LostPartnersError
    from packgraph.train.spikes import NonFiniteLossError, SpikeError

    is_failure = isinstance(error, NonFiniteLossError | SpikeError)
    what = "training failed" if is_failure else "error"
    print(printable(f"packgraph: {what}: {error}"), file=sys.stderr, flush=True)
    if isinstance(error, LostRankError):
        os._exit(LOST)  # process groups that are freed would wait for the rank that is lost
    return FAILED if is_failure or isinstance(error, LostPartnersError) else USER_ERROR


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


def _read(command: str, words: list[str], own: Any) -> Any:
    """The ParsedArguments of `words`; options of other commands are a problem of their own."""
    with _long_imports():
        from packgraph.train.config.command_line import leaves, parse_arguments
        from packgraph.train.config.presets import PRESETS
        from packgraph.train.config.reading import nearest

    # Which words are options does not depend on the preset, only their defaults do.
    base = next(iter(PRESETS.values()))()
    read = parse_arguments(words, own, base)
    elsewhere = {
        leaf.path: (name, leaf.option)
        for name, others in (("train", TrainArguments()), ("verify", VerifyArguments()))
        for leaf in leaves(others)
        if leaf.path in read.overrides.values
    }
    known = [leaf.path for leaf in leaves(base)]
    problems = list(read.overrides.problems)
    for path, (name, shown_as) in elsewhere.items():
        near = nearest(path, known)
        meant = f"; did you mean --{near}?" if near.endswith(f".{path}") else ""
        problems.append(
            f"{shown_as}: is no option of `packgraph {command}`, but of `packgraph {name}`{meant}"
        )
    left = {path: value for path, value in read.overrides.values.items() if path not in elsewhere}
    overrides = dataclasses.replace(read.overrides, values=left, problems=tuple(problems))
    return read._replace(overrides=overrides)


def _configure(read: Any, preset_name: str | None, more: Sequence[Any] = ()) -> Any:
    """The configuration that words describe; None without a preset where help or nothing of it is
    asked for.

    more: layers between the file and the options. Raises ConfigError.
    """
    from packgraph.train.checkpoint.weights import shape_layer
    from packgraph.train.config.command_line import dotted
    from packgraph.train.config.presets import PRESETS, data_layer, of_path, preset
    from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config
    from packgraph.train.run_folder import config_layer, run_of

    own, options = read.own, read.overrides
    asks_to_resume = getattr(own, "resume", False)
    resume = bool(asks_to_resume) or "run.resume" in dotted(options.values)
    layers = [config_layer(own.config, resume)] if own.config is not None else []
    name = preset_name or (layers[0].values.get("preset") if layers else None)
    if not isinstance(name, str):
        problems = list(options.problems)
        if layers:
            problems.append(
                f'{own.config}: says no preset; add `preset = "{next(iter(PRESETS))}"`, or name '
                "one on the command line"
            )
        elif options.values and not own.help:
            problems.append(f"name a preset ({', '.join(PRESETS)}) or a --config file")
        if problems:
            raise ConfigError(problems)
        return None
    name, live = of_path(name)
    if live is not None:
        layers.insert(0, live)
    base = preset(name)
    last = [options]
    if asks_to_resume:
        last.append(ConfigLayer("--resume", {"run": {"resume": asks_to_resume}}))
    layers += more
    if isinstance(own, TrainArguments) and not own.help:
        layers = [*data_layer(name, [*layers, *last]), *layers]
    config = read_config(base, [*layers, *last])
    init_from = config.run.init_from
    if init_from is not None and not (
        config.run.resume and not Path(init_from).expanduser().exists()
    ):
        layers.insert(0, shape_layer(init_from))
        config = read_config(base, [*layers, *last])
    if config.hf.path is not None:
        from packgraph.train.features.live import live_layer

        layers.insert(0, live_layer(config.hf.path))
        config = read_config(base, [*layers, *last])
    if config.run.resume and own.config is not None:
        # The run that goes on is the one the file lies in, wherever that folder is now.
        layers.append(ConfigLayer(str(own.config), run_of(own.config)))
        config = read_config(base, [*layers, *last])
    return dataclasses.replace(config, preset=name)


def _help(usage: str, own: Any) -> int:
    from packgraph.train.config.command_line import options_help

    print(f"{usage}\n{options_help(own)}")
    return 0


def _train_help(base: Any, every: bool) -> str:
    """Text of `packgraph train --help` for the values in `base`; every: `--help all`."""
    from packgraph.train.config.command_line import COMMON, all_options, options_help

    which = "Options" if every else "The options that most runs need"
    text = f"{TRAIN_USAGE}\n{options_help(TrainArguments())}\n\n{which}, with the defaults of "
    text += f"{base.preset}:\n"
    if every:
        return text + options_help(base)
    end = TRAIN_END.format(preset=base.preset, others=len(all_options(base)) - len(COMMON))
    return f"{text}{options_help(base, COMMON)}\n\n{end}"


def _train(words: list[str]) -> int:
    from packgraph.train.config.command_line import dotted
    from packgraph.train.config.presets import PRESETS
    from packgraph.train.config.reading import ConfigError

    read = _read("train", words, TrainArguments())
    config = _configure(read, read.own.preset)
    if read.own.help:
        print(_train_help(config or next(iter(PRESETS.values()))(), read.own.help == "all"))
        return 0
    if config is None:
        raise ConfigError(
            [f"which preset? One of: {', '.join(PRESETS)}. For example: packgraph train qwen3-tiny"]
        )
    with _long_imports():
        from packgraph.parallel.ranks import Launch
        from packgraph.train.launch import closing_lines, train

    folder, summary = train(config, dotted(read.overrides.values))
    launch = Launch.read()
    if launch.rank == 0:
        print(*closing_lines(config, folder, summary, launch), sep="\n", file=sys.stderr)
    return int(summary.get("exit_code", 0))


def _verify(words: list[str]) -> int:
    read = _read("verify", words, VerifyArguments())
    own = read.own
    config = _configure(read, own.preset)
    if own.help:
        return _help(VERIFY_USAGE, VerifyArguments())
    if own.hf_config is not None or own.layers is not None:
        return _verify_hf_config(own, config is not None)
    with _long_imports():
        from packgraph.verification.command import verify_command

    equal = verify_command(config, own.steps, one_process=not own.skip_one_process, apart=own.apart)
    return 0 if equal else FAILED


def _verify_hf_config(own: VerifyArguments, has_preset: bool) -> int:
    from packgraph.train.config.reading import ConfigError
    from packgraph.train.launch import choose_device
    from packgraph.verification.hf_model import verify_hf_config

    if own.hf_config is None:
        raise ConfigError(["--layers is an option of --hf-config"])
    problems = ["--hf-config and a preset exclude each other"] if has_preset else []
    problems += ["--apart is for presets, not for --hf-config"] if own.apart else []
    for name, count in (("--steps", own.steps), ("--layers", own.layers)):
        problems += [f"{name} must be at least 1"] if count is not None and count < 1 else []
    if problems:
        raise ConfigError(problems)
    found = verify_hf_config(
        own.hf_config, choose_device("auto"), steps=own.steps, layers=own.layers
    )
    print(found)
    return 0 if found else FAILED


def _plan_data(words: list[str]) -> int:
    from packgraph.train.config.presets import PRESETS
    from packgraph.train.config.reading import ConfigError
    from packgraph.train.plan import (
        PlanArguments,
        data_layers,
        introduction,
        plan_data,
        plan_data_context,
    )

    read = _read("plan", words, PlanArguments())
    own = read.own
    if own.data in PRESETS and own.preset is None:  # DATA may be left out
        own = dataclasses.replace(own, data=None, preset=own.data)
    preset = own.preset
    if own.data is not None and preset is None and own.config is None:
        preset = next(iter(PRESETS))
    problems = own.problems(read.given)
    if own.help:
        return _help(introduction(), PlanArguments())
    if preset is None and own.config is None and own.world is not None:
        problems.append("--world: whose documents? For example: packgraph plan stdlib --world 8")
    if problems:
        raise ConfigError([*read.overrides.problems, *problems])
    config = _configure(read, preset, data_layers(own.data))
    if config is None:
        return _help(introduction(), PlanArguments())
    text = plan_data(config, own) if own.world is None else plan_data_context(config, own)
    print(text, end="")
    return 0


def _plan_memory(words: list[str]) -> int:
    from packgraph.train.config.presets import PRESETS
    from packgraph.train.config.reading import ConfigError
    from packgraph.train.plan_memory import USAGE, PlanMemoryArguments, plan_memory_choices

    read = _read("plan memory", words, PlanMemoryArguments())
    if read.own.help:
        return _help(USAGE, PlanMemoryArguments())
    if problems := read.own.problems(read.given):
        raise ConfigError([*read.overrides.problems, *problems])
    preset = read.own.preset
    if preset is None and read.own.config is None:
        preset = next(iter(PRESETS))
    config = _configure(read, preset)
    print(plan_memory_choices(config, read.own), end="")
    return 0


def _plan(words: list[str]) -> int:
    from packgraph.train.plan import is_data_plan

    if words[:1] == ["memory"]:
        return _plan_memory(words[1:])
    return _plan_data(words) if is_data_plan(words) else _plan_schedule(words)


def _plan_schedule(words: list[str]) -> int:
    from packgraph.parallel.pipeline.schedule import (
        legal_microbatches,
        make_schedule,
        slot_counts,
        to_csv,
    )
    from packgraph.train.config.command_line import parse_arguments
    from packgraph.viz.schedule import (
        draw_svg,
        draw_text,
        make_picture,
        picture_errors,
        summarize,
        title,
    )

    asked = parse_arguments(words, ScheduleArguments()).own
    if asked.help:
        return _help(PLAN_USAGE, ScheduleArguments())
    problems = legal_microbatches(asked.ranks, asked.chunks, asked.group, asked.microbatches)
    actions = asked.ranks * asked.chunks * asked.microbatches
    if max(actions, asked.microbatches) > MOST_ACTIONS:
        problems.append(
            f"ranks x chunks x microbatches are {actions:,}, more than the {MOST_ACTIONS:,} that a "
            "picture shows"
        )
    else:
        problems += picture_errors(asked.microbatches, asked.capacities, asked.buckets)
    if problems:
        return _refuse_plan(problems)
    schedule = make_schedule(asked.ranks, asked.chunks, asked.microbatches, asked.group)
    picture, name = (
        make_picture(schedule, asked.capacities, asked.buckets),
        title(schedule, asked.group),
    )
    files = {asked.svg: draw_svg(picture, name) if asked.svg else "", asked.csv: to_csv(schedule)}
    for path, text in files.items():
        if path is not None:
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                return _refuse_plan([f"{path}: cannot be written: {error.strerror}"])
    print(
        f"{name}\n{draw_text(picture)}\n"
        f"{summarize(picture, slot_counts(asked.ranks, asked.chunks, asked.group))}",
        end="",
    )
    return 0


def _refuse_plan(problems: list[str]) -> int:
    print(
        "packgraph: error: this schedule cannot be drawn:\n  " + "\n  ".join(problems),
        file=sys.stderr,
    )
    return USER_ERROR


def _bench(words: list[str]) -> int:
    with _long_imports():
        from packgraph.bench.command import bench

    return bench(words)


def _export(words: list[str]) -> int:
    from packgraph.train.config.command_line import parse_arguments

    asked = parse_arguments(words, ExportArguments()).own
    if asked.help:
        return _help(EXPORT_USAGE, ExportArguments())
    with _long_imports():
        from packgraph.train.export import export

    checkpoint = export(asked.run, asked.folder, adapter=asked.adapter, best=asked.best)
    print(f"{checkpoint} written to {asked.folder}", file=sys.stderr)
    return 0


def _data(words: list[str]) -> int:
    with _long_imports():
        from packgraph.train.data.command import data_command

    return data_command(words)


def _chat(words: list[str]) -> int:
    with _long_imports():
        from packgraph.train.export import chat_command

    return chat_command(words)


def _presets(words: list[str]) -> int:
    from packgraph.train.config.presets import PRESETS
    from packgraph.train.config.reading import ConfigError

    if words and words[0] not in ("-h", "--help"):
        raise ConfigError([f"{word!r}: `packgraph presets` takes no arguments" for word in words])
    for name, make in PRESETS.items():
        print(f"{name:{max(map(len, PRESETS))}} {' '.join((make.__doc__ or '').split())}")
    return 0


def _completion(words: list[str]) -> int:
    from packgraph.train.config.command_line import completion_script, leaves, parse_arguments
    from packgraph.train.config.presets import PRESETS
    from packgraph.train.plan import PlanArguments
    from packgraph.train.plan_memory import PlanMemoryArguments

    asked = parse_arguments(words, CompletionArguments()).own
    if asked.help:
        return _help(COMPLETION_USAGE, CompletionArguments())
    with _long_imports():
        from packgraph.bench.command import BENCHMARKS
        from packgraph.train.data.command import DataArguments
        from packgraph.train.export import ChatArguments

    config, presets = list(leaves(next(iter(PRESETS.values()))())), tuple(PRESETS)
    plan = [*leaves(ScheduleArguments()), *leaves(PlanArguments()), *config]
    options = {
        "train": [*leaves(TrainArguments()), *config],
        "verify": [*leaves(VerifyArguments()), *config],
        "plan memory": [*leaves(PlanMemoryArguments()), *config],
        "plan": list({leaf.option: leaf for leaf in plan}.values()),
        "data": list(leaves(DataArguments())),
        "export": list(leaves(ExportArguments())),
        "chat": list(leaves(ChatArguments())),
        "presets": list(leaves(CommandArguments())),
        "completion": list(leaves(CompletionArguments())),
        **{f"bench {name}": list(leaves(one.options())) for name, one in BENCHMARKS.items()},
    }
    arguments = {
        "": tuple(COMMANDS),
        "train": presets,
        "verify": presets,
        "plan": ("stdlib", "memory", *presets),
        "data": ("build", "check"),
        "bench": tuple(BENCHMARKS),
        "completion": ("bash", "zsh", "fish"),
    }
    print(completion_script(asked.shell, options, arguments), end="")
    return 0


class Command(NamedTuple):
    """One command: what runs it, and its line in the help of all."""

    run: Callable[[list[str]], int]
    usage: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "train": Command(
        _train, "train PRESET", "train a model, for example: packgraph train qwen3-tiny"
    ),
    "verify": Command(
        _verify, "verify [PRESET]", "check that graph and eager training agree bit by bit"
    ),
    "plan": Command(
        _plan, "plan [DATA]", "draw a pipeline schedule, or choose buckets for the lengths of DATA"
    ),
    "data": Command(_data, "data build|check", "tokenize documents once into memory-mapped shards"),
    "bench": Command(_bench, "bench NAME", "time eager, compiled and graph runs side by side"),
    "export": Command(
        _export, "export RUN DIR", "write a run's newest checkpoint as Hugging Face weights"
    ),
    "chat": Command(_chat, "chat RUN", "try what a run has trained"),
    "presets": Command(_presets, "presets", "list the presets"),
    "completion": Command(
        _completion, "completion SHELL", "print a completion script for bash, zsh or fish"
    ),
}


if __name__ == "__main__":
    sys.exit(main())
