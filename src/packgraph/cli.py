"""The command `packgraph`: train, verify, plan, bench, export, presets.

Whatever a user can get wrong ends as one clear block on stderr and exit code 2; a run that fails
(the loss is no number, a verification differs) ends with 1; a run that was told to stop saves and
ends with 128 + the signal's number, or 75 at its time limit (train/signals.py). A traceback is
shown for our bugs only.
"""

import argparse
import contextlib
import dataclasses
import difflib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

USER_ERROR = 2
FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
MOST_PROBLEMS = 8
MOST_ACTIONS = 100_000  # of a schedule that is drawn
LONGEST_WORD, SHOWN = (
    4000,
    80,
)  # characters of an argument: all that are taken, and those that are quoted
OWN_OPTIONS = ("--config", "--resume", "--help", "--steps", "--skip-one-process", "--apart")
# Options that may be followed by a value of their own, or by the preset.
ALONE = {"--resume": "--resume=newest", "--help": "--help=short", "-h": "--help=short"}
WITH_VALUE = {("--resume=newest", "auto"): "--resume=auto", ("--help=short", "all"): "--help=all"}

TRAIN_INTRODUCTION = """usage: packgraph train [PRESET] [--config FILE] [--resume] [--section.option VALUE ...]

Train a model on packed documents through captured graphs. Start with

    packgraph train qwen3-tiny

which needs no data and no GPU. Results go to runs/NAME/: config.json, metrics.jsonl, tensorboard/, checkpoints/ and
summary.json.

  PRESET         the run to start from (see `packgraph presets`); may be left out with --config
  --config FILE  values from a .toml or .json file, such as runs/NAME/config.json; options win over it
  --resume       go on from the newest checkpoint of the run (the same as --run.resume)
  --resume auto  the same if there is one, else start afresh: for torchrun --max-restarts and jobs that are requeued
  --help all     every option

A run that is told to stop (Ctrl-C, SIGTERM, SIGUSR1, --run.max-minutes) saves after its step and ends with 128 + the
signal's number (130, 143, 138), or 75 at its time limit. Errors in what was asked for end with 2, failed runs with 1.

{which}, with the defaults of {preset}:"""  # noqa: E501
TRAIN_END = "`packgraph train {preset} --help all` has every option: {others} more."

VERIFY_INTRODUCTION = """\
usage: packgraph verify [PRESET] [--steps N] [--apart] [--config FILE] [--section.option VALUE ...]
       torchrun --nproc-per-node N -m packgraph.cli verify [PRESET] [--parallel.tp N ...] [--skip-one-process] ...

Train twice, eagerly and through captured graphs, and compare loss, gradients, parameters, buffers (biases of routers)
and random states after every step, bit by bit. Without PRESET: a small model under granularity layer and chunk, with
and without dropout, and one with latent attention and experts under several scopes. Exit code 1 on a difference.

Under torchrun every rank compares its own, at the layout of --parallel.dp, .cp, .tp, .pp and .ep (without PRESET: at
every layout of that many processes). A step that lacks room for experts is made again with more, in both runs. The run
is then also compared with one process: losses, gradients, weights and optimizer state must be equal within rounding,
whose limits are printed. For that, rank 0 holds the whole model once more.

The tables go to stdout, with how many rows of which size were compared. What takes long says on stderr where it is.

  --steps N           optimizer steps to compare (default: 50 for a preset, 30 for each run without one)
  --skip-one-process  leave out the comparison with one process
  --apart             make the eager run first and keep digests of all it computes, then the graph run: for models whose
                      training state takes more than half of the memory. A difference names step and tensor, but no
                      elements. With a preset only; under torchrun with --skip-one-process

Options are those of `packgraph train --help all`."""  # noqa: E501

PLAN_DESCRIPTION = """Draw a pipeline schedule: who runs what when, in which slot and bucket; and say what it costs:
slots per rank and chunk, steady memory, bubble. Nothing is run, no GPU and no data are needed.

    packgraph plan --ranks 4 --chunks 2 --microbatches 8 --svg plan.svg
    packgraph plan --ranks 2 --microbatches 4 --capacities 1024,2048 --buckets 0,1,0,0

`packgraph plan DATA` chooses buckets for the lengths of documents instead, and with --world N shares out one step's
documents to ranks (dynamic context parallelism); see `packgraph plan stdlib --help`."""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "train": _train,
        "verify": _verify,
        "plan": _plan,
        "bench": _bench,
        "export": _export,
        "presets": _presets,
    }
    try:
        if not words or words[0] not in commands:
            code = _top_level(words, list(commands))
        else:
            code = _with_clear_errors(commands[words[0]], words[1:])
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
def _no_lost_ctrl_c() -> Iterator[None]:
    """Around imports that take seconds. Raises KeyboardInterrupt for a Ctrl-C meanwhile, also for
    one that got lost.

    An exception that Python raises in a callback of the import system is printed or dropped, never
    passed on.
    """
    pressed = []

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _top_level(words: list[str], commands: list[str]) -> int:
    near = difflib.get_close_matches(words[0], commands, n=1) if words else []
    if near:
        print(
            f"packgraph: error: no command {words[0]!r}, did you mean {near[0]}? `packgraph "
            "--help` lists all",
            file=sys.stderr,
        )
        return USER_ERROR
    words = [word[:SHOWN] for word in words]
    parser = argparse.ArgumentParser(
        prog="packgraph",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train language models on packed documents of any length through CUDA graphs.",
        epilog="commands:\n"
        "  train PRESET     train a model, for example: packgraph train qwen3-tiny\n"
        "  verify [PRESET]  check that graph and eager training agree bit by bit\n"
        "  plan             draw a pipeline schedule and count its slots\n"
        "  plan DATA        choose buckets for the lengths of documents\n"
        "  bench NAME       time eager, compiled and graph runs side by side\n"
        "  export RUN DIR   write the newest checkpoint of a run as Hugging Face weights\n"
        "  presets          list the presets\n\n"
        "`packgraph COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"packgraph {_version()}")
    parser.add_argument("command", choices=commands, help="what to do")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    try:
        parser.parse_args(words or ["--help"])
    except SystemExit as end:
        return int(end.code or 0)
    return USER_ERROR


def _version() -> str:
    try:
        return metadata.version("packgraph")
    except metadata.PackageNotFoundError:
        return "(not installed, run from its source folder)"


def _with_clear_errors(command: Any, words: list[str]) -> int:
    """Run a command; turn what a user can cause into one block of text and an exit code."""
    with _no_lost_ctrl_c():
        from packgraph.graphs.errors import CaptureError
        from packgraph.models.hf import WeightsError
        from packgraph.parallel.consensus import LostPartnersError
        from packgraph.parallel.heartbeat import LOST, LostRankError
        from packgraph.train.checkpoint_reader import CheckpointError
        from packgraph.train.config import ConfigError
        from packgraph.train.config_values import printable
        from packgraph.train.data import DataError
        from packgraph.train.run_files import RunFileError
        from packgraph.train.trainer import NonFiniteLossError, SpikeError

    try:
        _check_words(words)
        return int(command(words))
    except (
        ConfigError,
        DataError,
        CheckpointError,
        CaptureError,
        RunFileError,
        WeightsError,
    ) as error:
        print(printable(f"packgraph: error: {error}"), file=sys.stderr)
        return USER_ERROR
    except (NonFiniteLossError, SpikeError) as error:
        print(printable(f"packgraph: training failed: {error}"), file=sys.stderr)
        return FAILED
    except LostPartnersError as error:
        print(printable(f"packgraph: error: {error}"), file=sys.stderr)
        return FAILED
    except LostRankError as error:
        print(printable(f"packgraph: error: {error}"), file=sys.stderr, flush=True)
        os._exit(LOST)  # process groups that are freed would wait for the rank that is lost


def _check_words(words: list[str]) -> None:
    """Raise ConfigError for an argument that is no text, or longer than any value."""
    from packgraph.train.config import ConfigError
    from packgraph.train.config_values import shown, text_problem

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


def _read(words: list[str]) -> tuple[Any, argparse.Namespace]:
    """The configuration that `words` describe (None where help is asked for or there is no preset),
    and own options."""
    from packgraph.train.command_line import dotted, split_overrides
    from packgraph.train.config import ConfigError, ConfigLayer, read_config
    from packgraph.train.presets import PRESETS, preset
    from packgraph.train.run_folder import run_of
    from packgraph.train.stored_config import config_layer
    from packgraph.train.weights import shape_layer

    parser = argparse.ArgumentParser(
        prog="packgraph", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("preset", nargs="?")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--resume", choices=("newest", "auto"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--skip-one-process", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--help", choices=("short", "all"))
    # Which words are options does not depend on the preset, only their defaults do.
    options, rest = split_overrides(
        _as_one_word(words), next(iter(PRESETS.values()))(), OWN_OPTIONS
    )
    try:
        own, unknown = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise ConfigError([str(error)]) from error
    if unknown:
        raise ConfigError([f"{word!r}: not expected here; see --help" for word in unknown])
    resume = bool(own.resume) or "run.resume" in dotted(options.values)
    layers = [config_layer(own.config, resume)] if own.config is not None else []
    name = own.preset or (layers[0].values.get("preset") if layers else None)
    if not isinstance(name, str):
        if layers:
            raise ConfigError(
                [
                    f'{own.config}: says no preset; add `preset = "{next(iter(PRESETS))}"`, or '
                    "name one "
                    "on the command line"
                ]
            )
        if options.values and not own.help:
            raise ConfigError([f"name a preset ({', '.join(PRESETS)}) or a --config file"])
        return None, own
    base = preset(name)
    flags = ConfigLayer(
        "--resume", {"run": {"resume": own.resume == "newest" or "auto"}} if own.resume else {}
    )
    config = read_config(base, [*layers, options, flags])
    init_from = config.run.init_from
    if init_from is not None and not (
        config.run.resume and not Path(init_from).expanduser().exists()
    ):
        layers.insert(0, shape_layer(init_from))
        config = read_config(base, [*layers, options, flags])
    if config.run.resume and own.config is not None:
        # The run that goes on is the one the file lies in, wherever that folder is now.
        config = read_config(
            base, [*layers, ConfigLayer(str(own.config), run_of(own.config)), options, flags]
        )
    own.asked = dotted(options.values)
    return dataclasses.replace(config, preset=name), own


def _as_one_word(words: list[str]) -> list[str]:
    """`words` with each option of `ALONE` and its value as one word."""
    found: list[str] = []
    for word in words:
        if found and (found[-1], word) in WITH_VALUE:
            found[-1] = WITH_VALUE[found[-1], word]
        else:
            found.append(ALONE.get(word, word))
    return found


def _train_help(base: Any, every: bool) -> str:
    """What `packgraph train --help` prints for the values in `base`; every: `--help all`."""
    from packgraph.train.command_line import COMMON, all_options, options_help

    which = "Options" if every else "The options that most runs need"
    text = TRAIN_INTRODUCTION.format(which=which, preset=base.preset)
    if every:
        return f"{text}\n{options_help(base)}"
    end = TRAIN_END.format(preset=base.preset, others=len(all_options(base)) - len(COMMON))
    return f"{text}\n{options_help(base, COMMON)}\n\n{end}"


def _train(words: list[str]) -> int:
    from packgraph.train.config import ConfigError
    from packgraph.train.presets import PRESETS

    config, own = _read(words)
    if own.help:
        print(_train_help(config or next(iter(PRESETS.values()))(), own.help == "all"))
        return 0
    if config is None:
        raise ConfigError(
            [f"which preset? One of: {', '.join(PRESETS)}. For example: packgraph train qwen3-tiny"]
        )
    if own.steps is not None:
        raise ConfigError(["--steps: did you mean --run.steps?"])
    if own.skip_one_process or own.apart:
        raise ConfigError(["--skip-one-process and --apart are options of `packgraph verify`"])
    from packgraph.parallel.processes import Launch
    from packgraph.train.after_run import closing_lines
    from packgraph.train.launch import train

    folder, summary = train(config, own.asked)
    launch = Launch.read()
    if launch.rank == 0:
        print(*closing_lines(config, folder, summary, launch), sep="\n", file=sys.stderr)
    return int(summary.get("exit_code", 0))


def _verify(words: list[str]) -> int:
    config, own = _read(words)
    if own.help:
        print(VERIFY_INTRODUCTION)
        return 0
    from packgraph.verification.command import verify_command

    equal = verify_command(config, own.steps, one_process=not own.skip_one_process, apart=own.apart)
    return 0 if equal else FAILED


def _plan_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        try:
            return [int(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected whole numbers such as 1,2,3, got {text!r}"
            ) from None

    parser = argparse.ArgumentParser(
        prog="packgraph plan",
        description=PLAN_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--microbatches",
        type=int,
        required=True,
        metavar="N",
        help="microbatches of the step drawn",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=1,
        metavar="N",
        help="chunks of the model per rank: 1F1B if 1, interleaved if more (default: 1)",
    )
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="microbatches that a chunk runs before the next chunk's turn (default: ranks)",
    )
    parser.add_argument(
        "--capacities",
        type=numbers,
        default=[],
        metavar="T,T,...",
        help="tokens of each bucket; times are then drawn in proportion",
    )
    parser.add_argument(
        "--buckets",
        type=numbers,
        default=[],
        metavar="I,I,...",
        help="bucket of each microbatch, as index of --capacities (default: the largest for all)",
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw to this file, whole and in colours"
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="also write the actions, in the words of torch.distributed.pipelining",
    )
    return parser


def _plan_data(words: list[str]) -> int:
    from packgraph.train.config import ConfigError
    from packgraph.train.plan_context import context_options, plan_data_context
    from packgraph.train.plan_data import as_run_options, introduction, own_options, plan_data

    asked, rest = own_options(words)
    context, rest = context_options(rest)
    config, own = _read(as_run_options(rest))
    if config is None and context is not None and not own.help:
        raise ConfigError(
            ["--world: whose documents? For example: packgraph plan stdlib --world 8"]
        )
    if own.help or config is None:
        print(introduction())
        return 0
    given = {
        "--resume": own.resume is not None,
        "--steps": own.steps is not None,
        "--apart": own.apart,
        "--skip-one-process": own.skip_one_process,
    }
    if any(given.values()):
        raise ConfigError(
            [
                f"{name}: is no option of `packgraph plan`"
                for name, is_given in given.items()
                if is_given
            ]
        )
    if context is not None:
        if asked.batch is not None:
            raise ConfigError(
                ["--batch: chooses buckets, and --world shares out documents; give one of them"]
            )
        print(plan_data_context(config, context, asked.json), end="")
        return 0
    print(plan_data(config, asked.batch, asked.json), end="")
    return 0


def _plan(words: list[str]) -> int:
    from packgraph.parallel.pipeline.schedule import (
        legal_microbatches,
        make_schedule,
        slot_counts,
        to_csv,
    )
    from packgraph.train.plan_data import is_data_plan
    from packgraph.viz.schedule import (
        draw_svg,
        draw_text,
        make_picture,
        picture_errors,
        summarize,
        title,
    )

    if is_data_plan(words):
        return _plan_data(words)
    try:
        asked = _plan_parser().parse_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    problems = legal_microbatches(asked.ranks, asked.chunks, asked.group, asked.microbatches)
    actions = asked.ranks * asked.chunks * asked.microbatches
    if max(actions, asked.microbatches) > MOST_ACTIONS:
        problems.append(
            f"ranks x chunks x microbatches are {actions:,}, more than the {MOST_ACTIONS:,} that a "
            "picture "
            "shows"
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
    from packgraph.bench.command import bench

    return bench(words)


def _export(words: list[str]) -> int:
    from packgraph.train.weights import export

    parser = argparse.ArgumentParser(
        prog="packgraph export",
        allow_abbrev=False,
        description="Write the weights of the newest checkpoint of a run "
        "as a Hugging Face checkpoint (config.json and safetensors), with the tokenizer.json it "
        "was trained with.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/NAME")
    parser.add_argument("folder", type=Path, help="new folder for the weights")
    try:
        asked = parser.parse_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    print(f"{export(asked.run, asked.folder)} written to {asked.folder}", file=sys.stderr)
    return 0


def _presets(words: list[str]) -> int:
    from packgraph.train.config import ConfigError
    from packgraph.train.presets import PRESETS

    if words and words[0] not in ("-h", "--help"):
        raise ConfigError([f"{word!r}: `packgraph presets` takes no arguments" for word in words])
    for name, make in PRESETS.items():
        print(f"{name:{max(map(len, PRESETS))}} {(make.__doc__ or '').splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
