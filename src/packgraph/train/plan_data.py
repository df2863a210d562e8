"""`packgraph plan DATA`: the buckets for the documents of a run, and what they will cost. Nothing
is run."""

import json
from collections.abc import Sequence
from pathlib import Path

from packgraph.packing.buckets.lengths import LengthHistogram
from packgraph.packing.buckets.planner import BucketRequest, measure
from packgraph.train.auto_capacities import Lengths, bucket_request, plan_capacities, read_lengths
from packgraph.train.config import ConfigError, ConfigLayer
from packgraph.train.config_values import path_problem, shown
from packgraph.train.data import build_tokenizer, open_documents
from packgraph.train.options import TrainConfig
from packgraph.train.plan_context import PlanArguments
from packgraph.train.presets import PRESETS
from packgraph.viz.buckets import describe_plan, plan_values

USAGE = """\
usage: packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]

Choose the capacities graphs are captured for from the lengths of the documents, as
`--graph.capacities auto` does in `packgraph train`, and say what they cost: padding, memory, time
for capture. Nothing is run, no GPU is needed. The preset is {preset} where none is named.

    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --buckets.max-tokens 16384
    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --world 8

Further options are those of `packgraph train --help all`; those that count are data.*, buckets.*,
graph.slots, model.* and parallel.*."""
SOURCES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def introduction() -> str:
    """The text of --help."""
    return USAGE.format(preset=next(iter(PRESETS)))


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


def data_layers(data: str | None) -> list[ConfigLayer]:
    """DATA as values of a configuration. Raises ConfigError for unknown data."""
    if data is None:
        return []
    if data == "stdlib":
        return [ConfigLayer("DATA", {"data": {"source": "stdlib"}})]
    problem = path_problem(data)
    if problem is not None:
        raise ConfigError([f"{shown(data)} cannot be the path of data: {problem}"])
    path = Path(data).expanduser()
    if not path.exists():
        raise ConfigError([f"{data}: no such file or folder, and no preset ({', '.join(PRESETS)})"])
    source = SOURCES.get(path.suffix.lower(), "text")
    return [ConfigLayer("DATA", {"data": {"source": source, "path": data}})]


def plan_data(config: TrainConfig, asked: PlanArguments) -> str:
    """The plan for the data of `config` as text. Raises ConfigError and DataError."""
    lengths = read_lengths(config, open_documents(config.data), build_tokenizer(config.data))
    request = bucket_request(config, batch=asked.batch)
    plan = plan_capacities(lengths, request)
    try:
        unseen = measure(plan.capacities, lengths.held_out, request.policy)
    except ValueError as error:
        raise ConfigError([f"{error} (buckets.max_tokens, data.overlong)"]) from error
    if asked.json:
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
