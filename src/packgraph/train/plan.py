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
from collections.abc import Sequence
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
    ContextCost,
    ContextRequest,
)
from packgraph.parallel.context.rows import context_problems
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.build import with_shape
from packgraph.train.config.planning import PlanArguments
from packgraph.train.config.reading import (
    ConfigError,
    one_problem,
    read_config,
)
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import ITEMSIZE, TrainConfig
from packgraph.train.config.stored import stored_config
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
from packgraph.train.run_files import SUMMARY, read_json
from packgraph.viz.buckets import describe_plan, plan_values
from packgraph.viz.context import context_values, describe_context, draw_context_svg

HELD_OUT = 5  # one document in so many
MULTIPLES = (64, 8, 1)  # of tokens, for the tiles of kernels; the first of which there are enough
FEWEST_SIZES = 16
GIBIBYTE = 2**30


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
    if config.loss.is_of_pairs:  # lengths are of both answers, each of which is a document
        both = [replace(one, documents=2 * one.documents) for one in plan.capacities]
        plan = replace(plan, capacities=tuple(both))
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


def run_plan(asked: RunRequest, own: PlanArguments) -> int:
    """Run `packgraph plan DATA`; returns the exit code. Raises ConfigError and DataError."""
    config, _ = with_shape(asked)
    if config.loss.is_of_pairs:
        raise one_problem(
            f"loss.name = {config.loss.name}: plans are of documents, not of pairs; a run chooses "
            "for pairs as it starts (graph.capacities = auto)"
        )
    print(plan_data(config, own) if own.world is None else plan_data_context(config, own), end="")
    return 0


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
