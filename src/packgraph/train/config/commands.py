"""Usage texts and own options of the commands of `packgraph`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packgraph.train.config.reading import CommandArguments, option

USAGE = """\
usage: packgraph COMMAND ...

Train language models on packed documents of any length through CUDA graphs.

commands:
{commands}

`packgraph COMMAND --help` explains a command, `packgraph --version` says which version this is."""

TRAIN_USAGE = """\
usage: packgraph train [PRESET] [--config FILE] [--resume] [--section.option VALUE ...]
       packgraph train hf:PATH ...

Train a model on packed documents through captured graphs. Start with

    packgraph train qwen3-tiny

which needs no data and no GPU. hf:PATH trains the model of transformers in the folder PATH, by its
own code; with --lora.rank adapters of it instead of all weights. Results go to runs/NAME/:
config.json, metrics.jsonl, tensorboard/, checkpoints/ and summary.json. Values come from the
preset, then the file, then options.

A run that is told to stop (Ctrl-C, SIGTERM, SIGUSR1, --run.max-minutes) saves after its step and
ends with 128 + the signal's number (130, 143, 138), or 75 at its time limit. Errors in what was
asked for end with 2, failed runs with 1."""
TRAIN_END = "`packgraph train {preset} --help all` has every option: {others} more."

TRY_USAGE = """\
usage: packgraph try PRESET | hf:PATH [--seconds N] [--data.path FILE] [--section.option VALUE ...]

Is it faster for me? Time eager, compiled and graph runs of a model on this device by turns, over
documents like yours: forward and backward, without the optimizer's update. The report says tokens a
second, memory, what ran eagerly and why, and the lines to change.

    packgraph try qwen3-tiny
    packgraph try hf:models/Qwen3-0.6B --data.path chats.jsonl

Without --data.path the documents are the source of Python's library. Further options are those of
`packgraph train --help all`; `packgraph.try_module` does the same for a module of your own."""

VERIFY_USAGE = """\
usage: packgraph verify [PRESET] [--steps N] [--apart] [--config FILE] [--section.option VALUE ...]
       packgraph verify --hf-config FILE [--layers N] [--steps N]
       torchrun --nproc-per-node N -m packgraph.cli verify [PRESET] [--parallel.tp N ...] ...

Train twice, eagerly and through captured graphs, and compare loss, gradients, parameters, buffers
(biases of routers) and random states after every step, bit by bit. Without PRESET: a small model
under granularity layer and chunk, with and without dropout, and one with latent attention and
experts under several scopes. Exit code 1 on a difference.

Under torchrun every rank compares its own, at the layout of --parallel.dp, .cp, .tp, .pp and .ep
(without PRESET: at every layout of that many processes). A step that lacks room for experts is made
again with more, in both runs. The run is then also compared with one process: losses, gradients,
weights and optimizer state must be equal within rounding, whose limits are printed. For that, rank
0 holds the whole model once more.

With --hf-config the model of any config.json of transformers is compared, with random weights and
documents, packed as packgraph.integrations.transformers.packed does.

The tables go to stdout, with how many rows of which size were compared. What takes long says on
stderr where it is. Further options are those of `packgraph train --help all`."""

PLAN_USAGE = """\
usage: packgraph plan --ranks N --microbatches N [--chunks N] [--group N] [--svg FILE] ...
       packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]
       packgraph plan memory [PRESET] [--tokens N] [--memory SIZE] [--world N] [--json]

Draw a pipeline schedule: who runs what when, in which slot and bucket; and say what it costs: slots
per rank and chunk, steady memory, bubble. Nothing is run, no GPU and no data are needed.

    packgraph plan --ranks 4 --chunks 2 --microbatches 8 --svg plan.svg
    packgraph plan --ranks 2 --microbatches 4 --capacities 1024,2048 --buckets 0,1,0,0

`packgraph plan DATA` chooses buckets for the lengths of documents instead, and with --world N
shares out one step's documents to ranks (dynamic context parallelism); see
`packgraph plan stdlib --help`. `packgraph plan memory` shows time against memory of recomputation
and offloading; with --world N, which ways to spread a run over N GPUs fit and are fastest."""

EXPORT_USAGE = """\
usage: packgraph export RUN FOLDER [--best] [--adapter]

Write the weights of the newest checkpoint of a run, or of the best one, as a Hugging Face
checkpoint (config.json and safetensors), with the tokenizer it was trained with. Adapters
(--lora.rank) are merged into the weights."""

COMPLETION_USAGE = """\
usage: packgraph completion SHELL

Print a script that completes commands, options and their values. To load it in every shell:

    bash   packgraph completion bash > ~/.local/share/bash-completion/completions/packgraph
    zsh    packgraph completion zsh > "${fpath[1]}/_packgraph"
    fish   packgraph completion fish > ~/.config/fish/completions/packgraph.fish"""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(CommandArguments):
    """Own options of `packgraph train`."""

    preset: str | None = option(
        None,
        "the run to start from (see `packgraph presets`); may be left out with --config",
        positional=True,
    )
    config: Path | None = option(
        None,
        "values from a .toml or .json file, such as runs/NAME/config.json; options win over it",
        metavar="FILE",
    )
    resume: bool | Literal["auto", "best"] = option(
        False,
        "go on from the newest checkpoint of the run (as --run.resume); auto = if there is one, "
        "else start afresh: for torchrun --max-restarts and jobs that are requeued; best = from "
        "the checkpoint of the lowest loss",
        metavar="auto|best",
    )
    help: Literal["short", "all"] | None = option(
        None,
        "explain the command, with the options that most runs need; all = with every one",
        metavar="all",
        bare="short",
    )


@dataclass(frozen=True, kw_only=True)
class TryArguments(CommandArguments):
    """Own options of `packgraph try`."""

    preset: str | None = option(None, "the run that is timed", positional=True)
    config: Path | None = option(None, "values from a .toml or .json file", metavar="FILE")
    seconds: float = option(120.0, "begin nothing further after this time", metavar="N")


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(CommandArguments):
    """Own options of `packgraph verify`."""

    preset: str | None = option(None, "the run that is compared", positional=True)
    config: Path | None = option(None, "values from a .toml or .json file", metavar="FILE")
    steps: int | None = option(
        None,
        "optimizer steps to compare (default: 50 for a preset, 30 for each run without one)",
        metavar="N",
    )
    skip_one_process: bool = option(False, "leave out the comparison with one process")
    apart: bool = option(
        False,
        "make the eager run first and keep digests of all it computes, then the graph run: for "
        "models whose training state takes more than half of the memory. A difference names step "
        "and tensor, but no elements. With a preset only; under torchrun with --skip-one-process",
    )
    hf_config: Path | None = option(
        None,
        "train the model of this config.json of transformers instead, with random weights",
        metavar="FILE",
    )
    layers: int | None = option(None, "of --hf-config: another number of layers", metavar="N")


@dataclass(frozen=True, kw_only=True)
class ScheduleArguments(CommandArguments):
    """Options of `packgraph plan` without data."""

    ranks: int = option(0, "pipeline ranks", metavar="N", required=True)
    microbatches: int = option(0, "microbatches of the step drawn", metavar="N", required=True)
    chunks: int = option(
        1, "chunks of the model per rank: 1F1B if 1, interleaved if more", metavar="N"
    )
    group: int | None = option(
        None,
        "microbatches that a chunk runs before the next chunk's turn (default: ranks)",
        metavar="N",
    )
    capacities: tuple[int, ...] = option(
        (), "tokens of each bucket; times are then drawn in proportion", metavar="T,T,..."
    )
    buckets: tuple[int, ...] = option(
        (),
        "bucket of each microbatch, as index of --capacities (default: the largest for all)",
        metavar="I,I,...",
    )
    svg: Path | None = option(None, "also draw to this file, whole and in colours", metavar="FILE")
    csv: Path | None = option(
        None,
        "also write the actions, in the words of torch.distributed.pipelining",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class ExportArguments(CommandArguments):
    """Arguments of `packgraph export`."""

    run: Path = option(
        Path(), "folder of the run, such as runs/NAME", positional=True, required=True
    )
    folder: Path = option(Path(), "new folder for the weights", positional=True, required=True)
    best: bool = option(False, "the checkpoint with the lowest loss instead of the newest")
    adapter: bool = option(
        False, "write the adapter of a run with --lora.rank alone, as peft reads it"
    )


@dataclass(frozen=True, kw_only=True)
class CompletionArguments(CommandArguments):
    """Arguments of `packgraph completion`."""

    shell: Literal["bash", "zsh", "fish"] = option(
        "bash", "bash, zsh or fish", positional=True, required=True
    )
