"""`graph.capacities = auto`: the capacities of a run follow from the lengths of its documents.

    documents ─▶ tokenizer ─▶ lengths ─▶ four of five: histogram ─▶ plan.buckets ─▶ capacities
                                         one of five: held out, for what the plan says of documents
                                             it has not seen

Lengths are read in the order of the first epoch, so a limited number of them is a sample, and every
process finds the same capacities. What is chosen is written into the run's config.json like
capacities that were given; a run that goes on takes them from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from packgraph.models.branches import head_sizes
from packgraph.ops.attention.api import choose_backend
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.buckets.lengths import LengthHistogram, PackingPolicy
from packgraph.packing.buckets.planner import BucketPlan, BucketRequest, choose_buckets
from packgraph.packing.capacity import places
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.config.reading import ConfigError, read_config
from packgraph.train.config.sections import TrainConfig
from packgraph.train.data.microbatches import overlong_of
from packgraph.train.data.source import BadDocumentError, DocumentSource
from packgraph.train.data.tokenizer import Tokenizer, tokenized
from packgraph.train.decoder_estimates import DecoderMemory, decoder_cost, graph_bytes
from packgraph.train.features.context import places_multiple
from packgraph.train.memory import limit_of
from packgraph.train.run_folder import stored_config

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
    return BucketRequest(
        policy=policy,
        max_tokens=buckets.max_tokens,
        max_buckets=buckets.max_count,
        multiple=multiple,
        cost=decoder_cost(
            model,
            parallel.tp * parallel.cp,
            FLASH4 if _attention(config, device) == "flash" else CostModel(),
        ),
        slots=slots,
        layers=layers,
        graph_bytes=graph_bytes(layers),
        pool_bytes=DecoderMemory(
            model,
            layers,
            2 if config.run.dtype == "bfloat16" else 4,
            parallel.tp,
            parallel.cp,
            config.graph.compile,
            in_place=device is None or device.type == "cuda",
        ),
        budget=_budget(config, device),
    )


def _budget(config: TrainConfig, device: torch.device | None) -> int | None:
    """Bytes that graphs may take: the tighter of both options. A share of a device that is not
    known limits nothing."""
    known = config.graph.memory_budget is not None and (
        device is not None or "%" not in config.graph.memory_budget
    )
    limit = limit_of(config.graph.memory_budget, device or torch.device("cpu")) if known else None
    chosen = (
        None if config.buckets.memory_gib is None else int(config.buckets.memory_gib * GIBIBYTE)
    )
    return min((budget for budget in (limit, chosen) if budget is not None), default=None)


def _attention(config: TrainConfig, device: torch.device | None) -> str:
    """Name of the attention backend of the run; auto where that depends on a device that is not
    known."""
    model = config.model
    if model.attention_backend != "auto" or device is None:
        return model.attention_backend
    return choose_backend(device, getattr(torch, config.run.dtype), *head_sizes(model)).name


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
    stored = read_config(config, [stored_config(folder).layer])
    return replace(config, graph=replace(config.graph, capacities=stored.graph.capacities))
