"""Plans from the lengths of documents: `graph.capacities = auto`, and `packgraph plan DATA`, which
says what a run would choose. Nothing is run.

    documents ─▶ tokenizer ─▶ lengths ─▶ four of five: histogram ─▶ choose_buckets ─▶ capacities
                                         one of five: held out, for what the plan says of documents
                                             it has not seen

Lengths are read in the order of the first epoch, so a limited number of them is a sample, and every
process finds the same capacities. What is chosen is written into the run's config.json like
capacities that were given; a run that goes on takes them from there.

The command shows buckets, and what they will cost; with `--world N`, which rank would hold which
document of a step, in groups of which size. Costs are those of a measured model scaled to the
run's, or those that a run has measured.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from packgraph.ops.attention.kind import row_problems
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketPlan, BucketRequest, choose_buckets, measure
from packgraph.packing.capacity import places
from packgraph.packing.pack import Overlong
from packgraph.parallel.context.plan import plan_context
from packgraph.parallel.context.request import (
    COEFFICIENTS,
    PLACES,
    ContextCost,
    ContextRequest,
)
from packgraph.parallel.context.rows import context_problems
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.config.presets import PRESETS
from packgraph.train.config.reading import (
    CommandArguments,
    ConfigError,
    ConfigLayer,
    Count,
    one_problem,
    option,
    path_problem,
    read_config,
    shown,
)
from packgraph.train.config.sections import ITEMSIZE, SOURCES, TrainConfig
from packgraph.train.data import build_tokenizer, open_documents
from packgraph.train.data.microbatches import overlong_of
from packgraph.train.data.source import BadDocumentError, DocumentSource
from packgraph.train.data.tokenizer import Tokenizer, tokenized
from packgraph.train.features.context import (
    common_multiple,
    context_choices,
    context_cost,
    context_notes,
    decoder_cost,
    kernels_cost,
    places_multiple,
    zigzag_sizes,
)
from packgraph.train.memory import DecoderMemory, graph_bytes, limit_of
from packgraph.train.run_files import read_json
from packgraph.train.run_folder import SUMMARY, stored_config
from packgraph.viz.buckets import describe_plan, plan_values
from packgraph.viz.context import context_values, describe_context, draw_context_svg

WITH_WORLD = frozenset(("tokens_per_rank", "sizes", "places", "microbatches", "costs", "svg"))
HELD_OUT = 5  # one document in so many
MULTIPLES = (64, 8, 1)  # of tokens, for the tiles of kernels; the first of which there are enough
FEWEST_SIZES = 16
GIBIBYTE = 2**30
PLAN_DATA_USAGE = f"""\
usage: packgraph plan DATA [PRESET] [--batch N | --world N] [--json] [--section.option VALUE ...]

Choose the capacities graphs are captured for from the lengths of the documents, as
`--graph.capacities auto` does in `packgraph train`, and say what they cost: padding, memory, time
for capture. Nothing is run, no GPU is needed. The preset is {next(iter(PRESETS))} where none is
named.

    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --buckets.max-tokens 16384
    packgraph plan chats.jsonl qwen3-0.6b --data.tokenizer tokenizer.json --world 8

Further options are those of `packgraph train --help all`; those that count are data.*, buckets.*,
graph.slots, model.* and parallel.*."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of documents with anything to predict: those to plan by, and those held
    out.

    They are the places that documents take up, where rows are cut for several ranks
    (`context_rows.places_multiple`). read: documents of the source that were looked at; total: all
    that it has.
    """

    planned: tuple[int, ...]
    held_out: tuple[int, ...]
    read: int
    total: int


def read_lengths(config: TrainConfig, documents: DocumentSource, tokenizer: Tokenizer) -> Lengths:
    """Tokenize up to `buckets.documents` documents. Raises DataError as training on them would."""
    order = np.random.default_rng([config.data.seed, 0]).permutation(len(documents))[
        : config.buckets.documents
    ]
    found: list[int] = []
    multiple, longest = places_multiple(config), config.buckets.max_tokens
    for index in order:
        try:
            encoded = tokenized(documents[int(index)], tokenizer)
        except BadDocumentError:
            if config.data.on_bad == "stop":
                raise
            continue
        found += [
            places(len(whole), multiple)
            for whole in encoded
            if whole.predicts
            and (len(whole) <= longest or overlong_of(whole, config.data) == config.data.overlong)
        ]
    planned = [length for number, length in enumerate(found) if (number + 1) % HELD_OUT]
    return Lengths(
        tuple(planned), tuple(found[HELD_OUT - 1 :: HELD_OUT]), len(order), len(documents)
    )


def bucket_request(
    config: TrainConfig, *, batch: int | None = None, device: torch.device | None = None
) -> BucketRequest:
    """Returns the planner's request for `config`.

    batch: documents packed at a time instead of the trainer's stream. device: of the run, where it
    is known; it says which attention kernels there are, and they what a place for a document costs.
    """
    buckets, parallel, model = config.buckets, config.parallel, config.model
    policy = PackingPolicy(
        documents=batch or config.data.window,
        batches=batch is not None,
        overlong=config.data.overlong,
    )
    tile = next(
        tile
        for tile in MULTIPLES
        if buckets.max_tokens % tile == 0
        and (tile == 1 or buckets.max_tokens >= FEWEST_SIZES * tile)
    )
    multiple = math.lcm(tile, parallel.row_parts, places_multiple(config))
    layers = -(-model.depth // (parallel.pp * parallel.chunks))
    slots = (
        max(map(sum, slot_counts(parallel.pp, parallel.chunks)))
        if parallel.pp > 1
        else config.graph.slots or 1
    )
    # Bytes that graphs may take: the tighter of both options. A share of a device that is not known
    # limits nothing.
    budget, limit = config.graph.memory_budget, None
    if budget is not None and (device is not None or "%" not in budget):
        limit = limit_of(budget, device or torch.device("cpu"))
    chosen = None if buckets.memory_gib is None else int(buckets.memory_gib * GIBIBYTE)
    return BucketRequest(
        policy=policy,
        max_tokens=buckets.max_tokens,
        max_buckets=buckets.max_count,
        multiple=multiple,
        cost=decoder_cost(
            model,
            parallel.tp * parallel.cp,
            kernels_cost(config, device),
        ),
        slots=slots,
        layers=layers,
        graph_bytes=graph_bytes(layers),
        pool_bytes=DecoderMemory(
            model,
            layers,
            ITEMSIZE[config.run.dtype],
            parallel.tp,
            parallel.cp,
            config.graph.compile,
            in_place=device is None or device.type == "cuda",
        ),
        budget=min((most for most in (limit, chosen) if most is not None), default=None),
    )


def plan_capacities(lengths: Lengths, request: BucketRequest) -> BucketPlan:
    """The plan for documents of these lengths. Raises ConfigError naming the options that would
    help."""
    try:
        return choose_buckets(LengthHistogram.of(lengths.planned), request)
    except ValueError as error:
        raise ConfigError(
            [
                f"graph.capacities = auto: {error} (buckets.max_tokens, buckets.memory_gib, "
                "data.overlong)"
            ]
        ) from error


def with_capacities(
    config: TrainConfig,
    documents: DocumentSource,
    tokenizer: Tokenizer,
    device: torch.device | None = None,
) -> tuple[TrainConfig, Sequence[str]]:
    """`config` with its capacities chosen if they are `auto`, and what is to be said of it.

    Raises DataError and ConfigError.
    """
    if config.graph.capacities != "auto":
        return config, ()
    lengths = read_lengths(config, documents, tokenizer)
    plan = plan_capacities(lengths, bucket_request(config, device=device))
    shown = ",".join(f"{found.tokens}x{found.documents}" for found in plan.capacities)
    chosen = (
        f"capacities {shown}, chosen for {len(lengths.planned)} documents: expected padding "
        f"{plan.sample.padding:.2%}"
    )
    return replace(config, graph=replace(config.graph, capacities=plan.capacities)), (
        chosen,
        *plan.notes,
    )


def with_stored_capacities(folder: Path, config: TrainConfig) -> TrainConfig:
    """`config` with the capacities that the run in `folder` chose, if they are `auto`: a run goes
    on with its own.

    Raises ConfigError when its config.json cannot be read.
    """
    if config.graph.capacities != "auto":
        return config
    stored = read_config(config, [stored_config(folder)[0]])
    return replace(config, graph=replace(config.graph, capacities=stored.graph.capacities))


@dataclass(frozen=True, kw_only=True)
class PlanArguments(CommandArguments):
    """Own options of `packgraph plan DATA`."""

    data: str | None = option(
        None,
        "a .jsonl or .parquet file, a folder of text files, or stdlib; a preset or --config FILE "
        "name their own",
        positional=True,
    )
    preset: str | None = option(
        None,
        "the run whose model and options are meant (see `packgraph presets`)",
        positional=True,
    )
    config: Path | None = option(None, "values from a .toml or .json file", metavar="FILE")
    batch: Count | None = option(
        None,
        "so many documents are packed at a time and none waits for the next ones, as with "
        "`packgraph.pack`; without it they are packed as the trainer does, while data.window wait",
        metavar="N",
    )
    json: bool = option(False, "print JSON instead of a table")
    world: int | None = option(
        None,
        "share out one step's documents to N ranks (data x context parallel) instead, in groups of "
        "the size that each needs; the following options go with it",
        metavar="N",
    )
    tokens_per_rank: int = option(
        2048, "tokens that a rank has places for in a microbatch", metavar="N"
    )
    sizes: tuple[int, ...] = option(
        (),
        "sizes of groups, divisors of N (default: the powers of two that divide N)",
        metavar="C,C,...",
    )
    places: tuple[int, ...] = option(
        PLACES,
        "places for documents that a row may have, each a variant of the graphs",
        metavar="N,N,...",
    )
    microbatches: int = option(8, "of the step; documents that come later wait", metavar="N")
    costs: Path | None = option(
        None,
        "costs of rows as this run has measured them (--parallel.time-rows), its folder or its "
        "summary.json; without it they are estimates",
        metavar="RUN",
    )
    svg: Path | None = option(None, "also draw to this file, with all documents", metavar="FILE")

    def problems(self, given: Collection[str]) -> list[str]:
        """Lists what is wrong with these options together, of which `given` were given."""
        alone = [f"--{name.replace('_', '-')}" for name in sorted(WITH_WORLD.intersection(given))]
        if self.world is None:
            return [f"{name}: goes with --world N" for name in alone]
        if self.batch is not None:
            return ["--batch: chooses buckets, and --world shares out documents; give one of them"]
        return []


def plan_data_context(config: TrainConfig, asked: PlanArguments) -> str:
    """The plan of the first step on the data of `config`, as text; draws the SVG. Raises
    ConfigError and DataError."""
    assert asked.world is not None
    parallel, problems = config.parallel, list[str]()
    try:
        request = ContextRequest(
            world=asked.world,
            tokens=asked.tokens_per_rank,
            sizes=asked.sizes,
            places=asked.places,
            microsteps=asked.microbatches,
        )
    except ValueError as error:
        raise one_problem(
            f"{error} (--world, --tokens-per-rank, --sizes, --places, --microbatches)"
        ) from error
    for size in sorted({*request.sizes} - {1}):
        found = context_problems(config.model, size, parallel.tp, parallel.cp_kind)
        problems += [f"{problem} (--sizes)" for problem in found]
    choices = {} if problems else context_choices(config, request.sizes)
    problems += [
        f"{problem} (--tokens-per-rank)"
        for size, choice in choices.items()
        for problem in row_problems(None, size * asked.tokens_per_rank, choice.kind, size)
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    cost = context_cost(
        config.model, parallel.tp, kernels_cost(config, None), zigzag_sizes(choices)
    )
    request = replace(request, cost=cost if asked.costs is None else _measured(asked.costs, cost))
    read = read_lengths(config, open_documents(config.data), build_tokenizer(config.data))
    multiple = common_multiple(choices)
    fitting = _fitting(read.planned, request.longest // multiple * multiple, config.data.overlong)
    plan = plan_context([places(length, multiple) for length in fitting], request)
    placed = [length for index, length in enumerate(plan.lengths) if index not in {*plan.left}]
    costs = (
        f"estimated for {config.preset}" if asked.costs is None else f"as measured by {asked.costs}"
    )
    title = (
        f"{config.data.path or config.data.source}: {len(placed):,} documents of {min(placed)} to "
        f"{max(placed):,} tokens on {request.world} ranks of {request.tokens:,} tokens, "
        f"{len(plan.microsteps)} microbatches; costs {costs}"
    )
    if asked.svg is not None:
        try:
            asked.svg.write_text(draw_context_svg(plan, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                [f"--svg {asked.svg}: cannot be written: {error.strerror}"]
            ) from error
    if asked.json:
        return json.dumps(context_values(plan), indent=2) + "\n"
    return "\n".join([title, *context_notes(choices), "", describe_context(plan)])


def _measured(run: Path, prior: ContextCost) -> ContextCost:
    """Reads a run's measured costs of rows from its summary. Raises ConfigError without any."""
    path = run / SUMMARY if run.is_dir() else run
    found = read_json(path).get("context", {})
    coefficients = {name: found.get("cost", {}).get(name) for name in COEFFICIENTS}
    if not found.get("cost_is_measured") or None in coefficients.values():
        raise ConfigError(
            [
                f"--costs {run}: {path} holds no measured costs; name a run made with "
                "--parallel.dynamic-cp true --parallel.time-rows true, of more steps than its "
                "warm-up"
            ]
        )
    return replace(prior, **coefficients)


def _fitting(lengths: Sequence[int], longest: int, overlong: Overlong) -> list[int]:
    """`lengths` in their order, those of more than `longest` tokens split or dropped. Raises
    ConfigError for an error."""
    found: list[int] = []
    for length in lengths:
        if length <= longest:
            found.append(length)
        elif overlong == "error":
            raise ConfigError(
                [
                    f"a document has {length:,} tokens, and the largest group holds {longest:,}: "
                    "give ranks "
                    "more tokens (--tokens-per-rank) or allow larger groups (--sizes), or choose "
                    "--data.overlong split or drop"
                ]
            )
        elif overlong == "split":
            found += [min(longest, length - start) for start in range(0, length, longest)]
    if not found:
        raise ConfigError(
            [
                f"no document has at most {longest:,} tokens, and all others are dropped: give "
                "ranks more "
                "tokens (--tokens-per-rank), or choose --data.overlong split"
            ]
        )
    return found


def is_data_plan(words: Sequence[str]) -> bool:
    """Tells whether `packgraph plan` is asked about data, not about a schedule, which has no words
    but options."""
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
    if (problem := path_problem(data)) is not None:
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
    histogram = LengthHistogram.of(lengths.planned)
    if asked.json:
        facts = {
            "documents": len(lengths.planned),
            "documents_held_out": len(lengths.held_out),
            "mean_tokens": histogram.mean,
            "longest_tokens": histogram.longest,
        }
        return json.dumps(facts | plan_values(plan, unseen), indent=2) + "\n"
    source = config.data.path or config.data.source
    if lengths.read != lengths.total:
        source += f" (a sample of {lengths.read:,} of {lengths.total:,})"
    how = "packed at a time" if request.policy.batches else "wait to be combined"
    several = (
        f"{histogram.documents:,} documents of {histogram.lengths[0]:,} to {histogram.longest:,} "
        f"tokens, half of them up to {histogram.quantile(0.5):,}, mean {histogram.mean:,.0f}"
    )
    one = f"1 document of {histogram.longest:,} tokens"
    title = f"{source}: {one if histogram.documents == 1 else several}"
    return f"{title}; {request.policy.documents} {how}\n\n{describe_plan(plan, unseen)}"
