"""Reads the words of a command: prints help, refuses mistakes, or says what is to run.

Nothing here imports torch, so help and mistakes are answered at once; what runs, does
(`Call`). `cli.py` has the table of commands, and imports this module once one of them is named. A
function takes the words behind the name, and returns a `Call`, or the exit code where all is said.
It raises ConfigError.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from packgraph.parallel.pipeline.schedule import (
    legal_microbatches,
    make_schedule,
    slot_counts,
    to_csv,
)
from packgraph.train.config.command_line import (
    COMMON,
    all_options,
    completion_script,
    leaves,
    options_help,
    parse_arguments,
)
from packgraph.train.config.commands import (
    CHAT_USAGE,
    COMPLETION_USAGE,
    DATA_USAGE,
    EVAL_USAGE,
    EXPORT_USAGE,
    TRAIN_END,
    TRAIN_USAGE,
    TRY_USAGE,
    VERIFY_USAGE,
    ChatArguments,
    CompletionArguments,
    DataArguments,
    EvalArguments,
    ExportArguments,
    TrainArguments,
    TryArguments,
    VerifyArguments,
)
from packgraph.train.config.planning import (
    PLAN_DATA_USAGE,
    PLAN_MEMORY_USAGE,
    PLAN_USAGE,
    PlanArguments,
    PlanMemoryArguments,
    ScheduleArguments,
    data_layers,
    is_data_plan,
)
from packgraph.train.config.presets import LIVE, PRESETS, data_layer, of_path, preset, recipes
from packgraph.train.config.reading import (
    CommandArguments,
    ConfigError,
    ConfigLayer,
    load_file,
    nearest,
)
from packgraph.train.config.request import RunRequest, missing_files
from packgraph.train.config.stored import config_layer, run_of
from packgraph.viz.schedule import (
    draw_svg,
    draw_text,
    make_picture,
    picture_errors,
    summarize,
    title,
)

MOST_ACTIONS = 100_000  # of a schedule that is drawn


class Call(NamedTuple):
    """What runs once the words are read: a function, as module:name, and its arguments."""

    place: str
    arguments: tuple[Any, ...]


def _read(command: str, words: list[str], own: Any) -> Any:
    """The ParsedArguments of `words`; options of other commands are a problem of their own."""
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


def _configure(read: Any, preset_name: str | None, more: Sequence[Any] = ()) -> RunRequest | None:
    """The run that words describe; None without a preset where help or nothing of it is asked for.

    more: layers between the file and the options. Raises ConfigError.
    """
    own, options = read.own, read.overrides
    asks_to_resume = getattr(own, "resume", False)
    resume = bool(asks_to_resume) or "run.resume" in options.values
    layers = [config_layer(own.config, resume)] if own.config is not None else []
    if preset_name in (found := recipes()):
        layers.insert(0, load_file(found[preset_name]))
        preset_name = None
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
    told = isinstance(own, TryArguments) and (own.config or "data.path" in options.values)
    if (isinstance(own, TrainArguments) or told) and not own.help:
        layers = [*data_layer(name, [*layers, *last]), *layers]
    asked = RunRequest(name, base, (*layers, *last))
    if own.config is not None and asked.read()[0].run.resume:
        # The run that goes on is the one the file lies in, wherever that folder is now.
        layers.append(ConfigLayer(str(own.config), run_of(own.config)))
    asked = dataclasses.replace(asked, layers=(*layers, *last))
    asked.read()
    return asked if own.help else asked.with_local_folders()


def _help(usage: str, own: Any) -> int:
    print(f"{usage}\n{options_help(own)}")
    return 0


def _train_help(base: Any, every: bool) -> str:
    """Text of `packgraph train --help` for the values in `base`; every: `--help all`."""
    which = "Options" if every else "The options that most runs need"
    text = f"{TRAIN_USAGE}\n{options_help(TrainArguments())}\n\n{which}, with the defaults of "
    text += f"{base.preset}:\n"
    if every:
        return text + options_help(base)
    end = TRAIN_END.format(preset=base.preset, others=len(all_options(base)) - len(COMMON))
    return f"{text}{options_help(base, COMMON)}\n\n{end}"


def read_train(words: list[str]) -> int | Call:
    """Trains a model, or explains how."""
    read = _read("train", words, TrainArguments())
    asked = _configure(read, read.own.preset)
    if read.own.help:
        base = next(iter(PRESETS.values()))() if asked is None else asked.read()[0]
        print(_train_help(base, read.own.help == "all"))
        return 0
    if asked is None:
        raise ConfigError(
            [f"which preset? One of: {', '.join(PRESETS)}. For example: packgraph train qwen3-tiny"]
        )
    world = os.environ.get("WORLD_SIZE", "1")  # what is no number is told when processes meet
    asked.check(int(world) if world.isdecimal() and len(world) < 7 else 1)
    return Call("packgraph.train.launch:run_train", (asked, frozenset(read.overrides.values)))


def read_try(words: list[str]) -> int | Call:
    """Times eager, compiled and graph runs of a preset or a model of transformers."""
    read = _read("try", words, TryArguments())
    asked = _configure(read, read.own.preset)
    if read.own.help:
        return _help(TRY_USAGE, TryArguments())
    if asked is None:
        raise ConfigError(["which preset? For example: packgraph try qwen3-tiny"])
    if read.own.seconds <= 0:
        raise ConfigError([f"--seconds must be positive, got {read.own.seconds:g}"])
    asked.check(1)
    words = [word for word in words if not word.startswith("--seconds=")]
    if "--seconds" in words:
        at = words.index("--seconds")
        words = [*words[:at], *words[at + 2 :]]
    given = shlex.join(words)
    return Call("packgraph.bench.trial:run_try", (asked, read.own.seconds, given))


def read_verify(words: list[str]) -> int | Call:
    """Compares eager training with graphs, of a preset, of the small models or of a config.json."""
    read = _read("verify", words, VerifyArguments())
    own = read.own
    asked = _configure(read, own.preset if own.hf_config is None else LIVE)
    if own.help:
        return _help(VERIFY_USAGE, VerifyArguments())
    problems = []
    if own.hf_config is None:
        problems += ["--layers is an option of --hf-config"] if own.layers is not None else []
        problems += missing_files(asked.read()[0]) if asked is not None else []
    elif own.preset is not None or own.config is not None:
        problems += ["--hf-config and a preset, or a --config file, exclude each other"]
    elif named := sorted(path for path in read.overrides.values if path.startswith("hf.")):
        problems += [f"--hf-config says what the model is, and so does --{named[0]}"]
    if own.layers is not None and own.layers < 1:
        problems += ["--layers must be at least 1"]
    if problems:
        raise ConfigError(problems)
    return Call("packgraph.verification.command:run_verify", (asked, own))


def _plan_data(words: list[str]) -> int | Call:
    read = _read("plan", words, PlanArguments())
    own = read.own
    if own.data in PRESETS and own.preset is None:  # DATA may be left out
        own = dataclasses.replace(own, data=None, preset=own.data)
    usual = next(iter(PRESETS)) if own.data is not None and own.config is None else None
    preset = own.preset or usual
    problems = own.problems(read.given)
    if own.help:
        return _help(PLAN_DATA_USAGE, PlanArguments())
    if preset is None and own.config is None and own.world is not None:
        problems.append("--world: whose documents? For example: packgraph plan stdlib --world 8")
    if problems:
        raise ConfigError([*read.overrides.problems, *problems])
    asked = _configure(read, preset, data_layers(own.data))
    if asked is None:
        return _help(PLAN_DATA_USAGE, PlanArguments())
    if problems := missing_files(asked.read()[0]):
        raise ConfigError(problems)
    return Call("packgraph.train.plan:run_plan", (asked, own))


def _plan_memory(words: list[str]) -> int | Call:
    read = _read("plan memory", words, PlanMemoryArguments())
    own = read.own
    if own.help:
        return _help(PLAN_MEMORY_USAGE, PlanMemoryArguments())
    if problems := own.problems(read.given):
        raise ConfigError([*read.overrides.problems, *problems])
    preset = own.preset or (next(iter(PRESETS)) if own.config is None else None)
    return Call("packgraph.train.plan_memory:run_plan_memory", (_configure(read, preset), own))


def read_plan(words: list[str]) -> int | Call:
    """Draws a schedule, or plans buckets, rows over ranks or memory."""
    if words[:1] == ["memory"]:
        return _plan_memory(words[1:])
    return _plan_data(words) if is_data_plan(words) else _plan_schedule(words)


def _plan_schedule(words: list[str]) -> int:
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
    if not problems:
        schedule = make_schedule(asked.ranks, asked.chunks, asked.microbatches, asked.group)
        picture = make_picture(schedule, asked.capacities, asked.buckets)
        name = title(schedule, asked.group)
        files = (asked.svg, lambda: draw_svg(picture, name)), (asked.csv, lambda: to_csv(schedule))
        for path, text in files:
            try:
                if path is not None:
                    path.write_text(text(), encoding="utf-8")
            except OSError as error:
                problems.append(f"{path}: cannot be written: {error.strerror}")
    if problems:
        told = "\n  ".join(["packgraph: error: this schedule cannot be drawn:", *problems])
        print(told, file=sys.stderr)
        return 2
    slots = slot_counts(asked.ranks, asked.chunks, asked.group)
    print(f"{name}\n{draw_text(picture)}\n{summarize(picture, slots)}", end="")
    return 0


def read_data(words: list[str]) -> int | Call:
    """Tokenizes documents into shards, or checks these."""
    parsed = parse_arguments(words, DataArguments())
    asked = parsed.own
    if asked.help:
        return _help(DATA_USAGE, DataArguments())
    if asked.action == "check":
        if foreign := sorted(parsed.given - {"action", "folder"}):
            raise ConfigError([f"--{name.replace('_', '-')}: goes with build" for name in foreign])
        return Call("packgraph.train.data.shard_build:run_check", (asked.folder,))
    config = asked.config(names_source="source" in parsed.given)
    return Call("packgraph.train.data.shard_build:run_build", (config, asked))


def read_export(words: list[str]) -> int | Call:
    """Writes a run's checkpoint as Hugging Face weights."""
    asked = parse_arguments(words, ExportArguments()).own
    if asked.help:
        return _help(EXPORT_USAGE, ExportArguments())
    return Call("packgraph.train.export:run_export", (asked,))


def read_chat(words: list[str]) -> int | Call:
    """Tries what a run has trained."""
    asked = parse_arguments(words, ChatArguments()).own
    if asked.help:
        return _help(CHAT_USAGE, ChatArguments())
    if problems := asked.problems():
        raise ConfigError(problems)
    return Call("packgraph.train.export:run_chat", (asked,))


def read_eval(words: list[str]) -> int | Call:
    """Scores what a run has trained on benchmarks."""
    asked = parse_arguments(words, EvalArguments()).own
    if asked.help:
        return _help(EVAL_USAGE, EvalArguments())
    if not asked.tasks:
        raise ConfigError(["which tasks? For example: --tasks hellaswag,arc_easy"])
    return Call("packgraph.train.tasks:run_eval", (asked,))


def read_presets(words: list[str]) -> int:
    """Lists the presets."""
    if words and words[0] not in ("-h", "--help"):
        raise ConfigError([f"{word!r}: `packgraph presets` takes no arguments" for word in words])
    for name, make in PRESETS.items():
        print(f"{name:{max(map(len, PRESETS))}} {' '.join((make.__doc__ or '').split())}")
    return 0


def read_recipes(words: list[str]) -> int:
    """Lists the recipes: whole runs, of which some options are still to be named."""
    if words and words[0] not in ("-h", "--help"):
        raise ConfigError([f"{word!r}: `packgraph recipes` takes no arguments" for word in words])
    for name, file in recipes().items():
        summary, _, command = file.read_text(encoding="utf-8").splitlines()[:3]
        print(f"{name}\n  {summary.lstrip('# ')}\n    {command.lstrip('# ')}")
    print("\nOptions come behind; `packgraph train NAME --help` has the values of a recipe.")
    return 0


def read_completion(words: list[str]) -> int:
    """Prints a completion script."""
    asked = parse_arguments(words, CompletionArguments()).own
    if asked.help:
        return _help(COMPLETION_USAGE, CompletionArguments())
    config, names = list(leaves(next(iter(PRESETS.values()))())), (*PRESETS, *recipes())
    planned = [*leaves(ScheduleArguments()), *leaves(PlanArguments()), *config]
    options = {
        "train": [*leaves(TrainArguments()), *config],
        "try": [*leaves(TryArguments()), *config],
        "verify": [*leaves(VerifyArguments()), *config],
        "plan memory": [*leaves(PlanMemoryArguments()), *config],
        "plan": list({leaf.option: leaf for leaf in planned}.values()),
        "data": list(leaves(DataArguments())),
        "export": list(leaves(ExportArguments())),
        "chat": list(leaves(ChatArguments())),
        "eval": list(leaves(EvalArguments())),
        "presets": list(leaves(CommandArguments())),
        "recipes": list(leaves(CommandArguments())),
        "completion": list(leaves(CompletionArguments())),
    }
    arguments = {
        "": tuple(dict.fromkeys(name.partition(" ")[0] for name in options)),
        "train": names,
        "try": names,
        "verify": names,
        "plan": ("stdlib", "memory", *names),
        "data": ("build", "check"),
        "completion": ("bash", "zsh", "fish"),
    }
    print(completion_script(asked.shell, options, arguments), end="")
    return 0
