"""Usage texts and own options of the commands of `packgraph`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packgraph.train.config.reading import CommandArguments, ConfigError, Count, option
from packgraph.train.config.sections import SOURCES, DataConfig

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
config.json, metrics.jsonl, run.log, tensorboard/, checkpoints/ and summary.json. Values come from
the preset, then the file, then options.

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
       packgraph verify --hf-config FILE [--layers N] [--steps N] [--section.option VALUE ...]
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
documents, as a run of hf:FOLDER, under torchrun at any fixed layout (--parallel.tp 2).

Results go to stdout: without PRESET one table of all runs, and a table of its own for a run that
differs (with --verbose for each), with how many rows of which size were compared. Progress goes to
stderr. Further options are those of `packgraph train --help all`."""

EXPORT_USAGE = """\
usage: packgraph export RUN FOLDER [--best] [--adapter]

Write the weights of the newest checkpoint of a run, or of the best one, as a Hugging Face
checkpoint (config.json and safetensors), with the tokenizer it was trained with. Adapters
(--lora.rank) are merged into the weights."""

CHAT_USAGE = """\
usage: packgraph chat RUN [--best] [--prompt TEXT] [--text] [--tokens N] [--temperature T] ...

Try what was trained: exports the newest checkpoint of a run to a temporary folder, and answers with
transformers, on a GPU where there is one. An answer appears as it is made; --temperature draws its
tokens at random instead of taking the likeliest. Without --prompt every line of the input is a turn
of one chat."""

EVAL_USAGE = """\
usage: packgraph eval RUN --tasks NAME,... [--best] [--shots N] [--limit N] [--chat] ...

Score what was trained on benchmarks of lm-evaluation-harness (pip install lm-eval): exports the
newest checkpoint of a run to a temporary folder, which the harness loads by transformers.

    packgraph eval runs/NAME --tasks hellaswag,arc_easy --limit 100

Tasks are those of `lm-eval ls tasks`, and of YAML files in --include FOLDER."""

DATA_USAGE = """\
usage: packgraph data build FOLDER --source jsonl --path FILE [--tokenizer FILE] ...
       packgraph data check FOLDER

Tokenize documents once, by all cores, into memory-mapped shards:

    packgraph data build shards/chats --source jsonl --path chats.jsonl --tokenizer tokenizer.json
    packgraph train qwen3-0.6b --data.source shards --data.path shards/chats \\
        --data.tokenizer tokenizer.json

A build that was stopped goes on when the same command is run again. `check` compares every file
with its SHA-256 and names those that differ (exit code 2)."""

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
        "values from a .toml, .yaml or .json file, such as runs/NAME/config.json; options win",
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
    config: Path | None = option(None, "values from a .toml, .yaml or .json file", metavar="FILE")
    seconds: float = option(120.0, "begin nothing further after this time", metavar="N")


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(CommandArguments):
    """Own options of `packgraph verify`."""

    preset: str | None = option(None, "the run that is compared", positional=True)
    config: Path | None = option(None, "values from a .toml, .yaml or .json file", metavar="FILE")
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
    verbose: bool = option(False, "a table for every run, not only for those that differ")
    hf_config: Path | None = option(
        None,
        "train the model of this config.json of transformers instead, with random weights",
        metavar="FILE",
    )
    layers: int | None = option(None, "of --hf-config: another number of layers", metavar="N")


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


@dataclass(frozen=True, kw_only=True)
class ChatArguments(CommandArguments):
    """Arguments of `packgraph chat`."""

    run: Path = option(
        Path(), "folder of the run, such as runs/NAME", positional=True, required=True
    )
    best: bool = option(False, "the checkpoint with the lowest loss instead of the newest")
    prompt: str | None = option(None, "answer this alone, and end", metavar="TEXT")
    text: bool = option(False, "go on with what is given as a text, not as a chat")
    tokens: int = option(200, "tokens of an answer at most", metavar="N")
    temperature: float = option(
        0.0, "what scores are divided by before tokens are drawn; 0 = take the likeliest"
    )
    top_p: float = option(1.0, "draw from the likeliest tokens, of this probability together")
    seed: int = option(0, "of what is drawn")
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "auto = cuda where there is one, cpu otherwise"
    )

    def problems(self) -> list[str]:
        """Returns every value that makes no sense, in words."""
        found = {
            f"--tokens must be at least 1, got {self.tokens}": self.tokens < 1,
            f"--temperature must be at least 0, got {self.temperature}": not self.temperature >= 0,
            f"--top-p must be above 0 and at most 1, got {self.top_p}": not 0 < self.top_p <= 1,
        }
        return [words for words, is_wrong in found.items() if is_wrong]


@dataclass(frozen=True, kw_only=True)
class EvalArguments(CommandArguments):
    """Arguments of `packgraph eval`."""

    run: Path = option(
        Path(), "folder of the run, such as runs/NAME", positional=True, required=True
    )
    tasks: tuple[str, ...] = option((), "names of tasks, separated by commas", metavar="NAME,...")
    best: bool = option(False, "the checkpoint with the lowest loss instead of the newest")
    shots: Count | None = option(None, "examples in a prompt; a task has its own number")
    limit: Count | None = option(None, "only the first questions of a task up to this number")
    chat: bool = option(False, "ask in the form of the model's chats")
    include: Path | None = option(None, "folder with further tasks, as YAML", metavar="FOLDER")
    out: Path | None = option(None, "write all results there, as JSON", metavar="FILE")
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "auto = cuda where there is one, cpu otherwise"
    )


@dataclass(frozen=True, kw_only=True)
class DataArguments(CommandArguments):
    """Options of `packgraph data`."""

    action: Literal["build", "check"] = option(
        "build", "build or check", positional=True, required=True
    )
    folder: Path = option(Path(), "of the shards", positional=True, required=True)
    source: Literal["stdlib", "jsonl", "text", "parquet"] = option(
        "stdlib", "what is tokenized, as --data.source of train"
    )
    path: str | None = option(None, "file or folder of the source", metavar="PATH")
    suffixes: tuple[str, ...] = option(
        DataConfig().suffixes, "endings of the files that count in a folder of text files"
    )
    text_column: str = option("text", "column of the text in jsonl and parquet", metavar="NAME")
    tokenizer: str = option(
        "bytes", "bytes = one token a byte, or the path of a tokenizer.json", metavar="FILE"
    )
    on_bad: Literal["stop", "skip"] = option(
        "stop", "documents that cannot be read: end the build, or leave them out and count them"
    )
    max_documents: Count | None = option(
        None, "only the first documents up to this number", metavar="N"
    )
    workers: Count | None = option(None, "processes that tokenize (default: all cores)")
    rows_per_shard: Count | None = option(
        None,
        "documents of the source in a shard (default: at least 2048, and at most 1024 shards)",
        metavar="N",
    )

    def config(self, *, names_source: bool = True) -> DataConfig:
        """Options of the data; the path's ending names the source if nothing else does. Raises
        ConfigError."""
        named = SOURCES.get(Path(self.path or "").suffix.lower())
        try:
            return DataConfig(
                source=self.source if names_source or named is None else named,
                path=self.path,
                suffixes=self.suffixes,
                text_column=self.text_column,
                tokenizer=self.tokenizer,
                on_bad=self.on_bad,
                max_documents_loaded=self.max_documents,
            )
        except ValueError as error:
            raise ConfigError([str(error)]) from error
