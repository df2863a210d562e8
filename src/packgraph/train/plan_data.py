"""`packgraph plan DATA`: the buckets for the documents of a run, and what they will cost. Nothing
is run."""

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from packgraph.packing.buckets.lengths import LengthHistogram
from packgraph.packing.buckets.planner import BucketRequest, measure
from packgraph.train.auto_capacities import Lengths, bucket_request, plan_capacities, read_lengths
from packgraph.train.config import ConfigError
from packgraph.train.config_values import path_problem, shown
from packgraph.train.data import build_tokenizer, open_documents
from packgraph.train.options import TrainConfig
from packgraph.train.plan_context import options_help
from packgraph.train.presets import PRESETS
from packgraph.viz.buckets import describe_plan, plan_values

INTRODUCTION = """usage: packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]

Choose the capacities graphs are captured for from the lengths of the documents, as `--graph.capacities auto` does in
`packgraph train`, and say what they cost: padding, memory, time for capture. Nothing is run, no GPU is needed.

    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --buckets.max-tokens 16384

  DATA       a .jsonl or .parquet file, a folder of text files, or stdlib; a preset or --config FILE name their own
  PRESET     the run whose model and options are meant (default: {preset})
  --batch N  N documents are packed at a time and none waits for the next ones, as `packgraph.pack` does with what it
             is given; without it documents are packed as the trainer does, while data.window of them wait
  --json     print JSON instead of a table
{context}

    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --world 8 --tokens-per-rank 2048

Options are those of `packgraph train --help all`; those that count are data.*, buckets.*, graph.slots, model.*, parallel.*."""  # noqa: E501
SOURCES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def introduction() -> str:
    """The text of --help."""
    return INTRODUCTION.format(preset=next(iter(PRESETS)), context=options_help())


def is_data_plan(words: Sequence[str]) -> bool:
    """Whether `packgraph plan` is asked about data and not about a schedule, which has no words but
    options."""
    return bool(words) and (
        not words[0].startswith("-")
        or any(
            word.partition("=")[0] in ("--config", "--world")
            or word.startswith(("--data.", "--buckets."))
            for word in words
        )
    )


def own_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command (`batch`, `json`), and the words that are left. Raises
    ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--json", action="store_true")
    try:
        own, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError([str(error)]) from error
    for word in rest:
        near = difflib.get_close_matches(
            word.partition("=")[0], ("--batch", "--json"), n=1, cutoff=0.8
        )
        if near and word.startswith("--"):
            raise ConfigError([f"{word}: unknown option, did you mean {near[0]}?"])
    if own.batch is not None and own.batch < 1:
        raise ConfigError([f"--batch must be at least 1, got {own.batch}"])
    return own, rest


def as_run_options(words: Sequence[str]) -> list[str]:
    """`words` with DATA and PRESET as options that `packgraph train` knows. Raises ConfigError for
    unknown data."""
    if not words or words[0].startswith("-") or words[0] in PRESETS:
        return list(words)
    data, rest = words[0], list(words[1:])
    named = rest[:1] if rest and not rest[0].startswith("-") else []
    others = rest[len(named) :]
    if not named and not any(word.partition("=")[0] == "--config" for word in others):
        named = [next(iter(PRESETS))]
    if data == "stdlib":
        return [*named, "--data.source", "stdlib", *others]
    problem = path_problem(data)
    if problem is not None:
        raise ConfigError([f"{shown(data)} cannot be the path of data: {problem}"])
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError([f"{data}: no such file or folder, and no preset ({', '.join(PRESETS)})"])
    source = SOURCES.get(path.suffix.lower(), "text")
    return [*named, "--data.source", source, "--data.path", data, *others]


def plan_data(config: TrainConfig, batch: int | None, as_json: bool) -> str:
    """The plan for the data of `config` as text. Raises ConfigError and DataError."""
    lengths = read_lengths(config, open_documents(config.data), build_tokenizer(config.data))
    request = bucket_request(config, batch=batch)
    plan = plan_capacities(lengths, request)
    try:
        unseen = measure(plan.capacities, lengths.held_out, request.policy)
    except ValueError as error:
        raise ConfigError([f"{error} (buckets.max_tokens, data.overlong)"]) from error
    if as_json:
        histogram = LengthHistogram.of(lengths.planned)
        facts = {
            "documents": len(lengths.planned),
            "documents_held_out": len(lengths.held_out),
            "mean_tokens": histogram.mean,
            "longest_tokens": histogram.longest,
        }
        return json.dumps(facts | plan_values(plan, unseen), indent=2) + "\n"
    return f"{_title(config, lengths, request)}\n\n{describe_plan(plan, unseen)}"


def _title(config: TrainConfig, lengths: Lengths, request: BucketRequest) -> str:
    histogram = LengthHistogram.of(lengths.planned)
    source = config.data.path or config.data.source
    some = (
        ""
        if lengths.read == lengths.total
        else f" (a sample of {lengths.read:,} of {lengths.total:,})"
    )
    how = (
        f"{request.policy.documents} packed at a time"
        if request.policy.batches
        else f"{request.policy.documents} wait to be combined"
    )
    if histogram.documents == 1:
        return f"{source}{some}: 1 document of {histogram.longest:,} tokens; {how}"
    return (
        f"{source}{some}: {histogram.documents:,} documents of {histogram.lengths[0]:,} to "
        f"{histogram.longest:,} "
        f"tokens, half of them up to {histogram.quantile(0.5):,}, mean {histogram.mean:,.0f}; {how}"
    )
