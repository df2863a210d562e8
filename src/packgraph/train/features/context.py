"""Context parallelism in a run: how rows are cut for the ranks that share them, what its options
mean, and what rows cost on this machine.

With dynamic context parallelism:

    parallel.cp = 4, parallel.dynamic_cp, graph.capacities = 8192x16,8192x64

    8192 tokens on 4 ranks are L = 2048 a rank
    rows of 1, 2 or 4 ranks: 2048, 4096 or 8192 tokens, each with places for 16 or 64 documents:
    6 buckets; with parallel.min_cp = 2 rows of 2 or 4 ranks: 4 buckets

A capacity is that of the largest row, as without dynamic_cp, so `cp` says how long a document may
be. The number of ranks of a row follows from its tokens (T / L), so a bucket of the bank is a
capacity as ever. The ranks of dp x cp are one plane, in which groups are blocks of consecutive
ranks; none is larger than cp, so a block never leaves its `cp`.

A few rows of every size are timed, and the planner's costs are fitted to them:

    estimates plan the first steps ─▶ warm-up, capture, one step ─▶ rows timed ─▶ fit
    ─▶ measured costs plan the rest

Rows are those that the run replays, at the sizes and places that its plans have: one document that
fills the row, whose cost is attention, and short ones, whose cost is all else. All ranks run the
same rows in groups of one size at a time, and the slowest rank counts, so all of them find the same
numbers and go on with the same plans.

The invariant: of the timed rows nothing is left but gradients, which the next step begins by
zeroing. Weights are not touched; buffers, random states and counts are put back.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from packgraph.graphs.backend import synchronize
from packgraph.models.branches import head_sizes, head_weights, token_weights
from packgraph.models.config import DecoderConfig
from packgraph.ops.attention.api import choose_backend
from packgraph.ops.attention.kind import ContextChoice, document_multiple
from packgraph.packing.batch import PackedBatch
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import (
    COEFFICIENTS,
    EXCHANGE_US,
    GATHER_US,
    GROUP_US,
    ContextCost,
    ContextRequest,
    RowTiming,
    fit,
)
from packgraph.parallel.context.rows import context_choice
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import gather_numbers
from packgraph.train.config.sections import TrainConfig
from packgraph.train.random_state import random_states, set_random_states


def context_choices(
    config: TrainConfig, sizes: Iterable[int] | None = None
) -> dict[int, ContextChoice]:
    """Maps each number of ranks over 1 that may share a row (None: in a run of `config`) to how
    they share attention.

    Raises ValueError where that cannot be, which `validate` finds first.
    """
    parallel = config.parallel
    if sizes is None:
        sizes = (parallel.cp, *(parallel.context_sizes if parallel.dynamic_cp else ()))
    return {
        size: context_choice(config.model, size, parallel.tp, parallel.cp_kind)
        for size in sorted({*sizes} - {1})
    }


def zigzag_sizes(choices: Mapping[int, ContextChoice]) -> tuple[int, ...]:
    """The numbers of ranks whose rows are cut in zigzag."""
    return tuple(size for size, choice in choices.items() if choice.kind == "zigzag")


def common_multiple(choices: Mapping[int, ContextChoice]) -> int:
    """Documents take up multiples of so many places, whatever row they come to."""
    return math.lcm(*(document_multiple(choice.kind, size) for size, choice in choices.items()))


def places_multiple(config: TrainConfig) -> int:
    """`common_multiple` of the run."""
    return 1 if config.parallel.cp_kind == "ulysses" else common_multiple(context_choices(config))


def context_notes(choices: Mapping[int, ContextChoice]) -> list[str]:
    """Notes on rows that are cut in zigzag; none where no row is."""
    cut = {size: choices[size] for size in zigzag_sizes(choices)}
    why = "; ".join(f"{size} ranks: {choice.reason}" for size, choice in cut.items())
    return (
        [
            f"rows are cut in zigzag ({why}), documents take up multiples of "
            f"{common_multiple(choices)} places"
        ]
        if cut
        else []
    )


def longest_row(config: TrainConfig) -> int:
    """Tokens that one rank has of the longest row; rows are spread over the ranks of a context."""
    auto = config.graph.capacities == "auto"
    row = (
        config.buckets.max_tokens
        if auto
        else max(c.tokens for c in config.graph.packing_capacities())
    )
    return -(-row // config.parallel.cp)


def stage_tokens(config: TrainConfig) -> int:
    """Tokens that meet one copy of a layer's weights, for `models.decoder.stage_layers`: of all
    ranks that share experts."""
    return longest_row(config) * config.parallel.ep


def rank_tokens(config: TrainConfig) -> int | None:
    """Tokens L that every rank has of whatever row it works on; None where the ranks of a row do
    not change."""
    if not config.parallel.dynamic_cp:
        return None
    return (
        max(capacity.tokens for capacity in config.graph.packing_capacities()) // config.parallel.cp
    )


def with_context_buckets(config: TrainConfig) -> TrainConfig:
    """`config` whose capacities are those of all rows that a plan may have, for graphs; itself
    without dynamic_cp."""
    if (tokens := rank_tokens(config)) is None:
        return config
    buckets = sorted(
        {
            Capacity(size * tokens, capacity.documents)
            for size in config.parallel.context_sizes
            for capacity in config.graph.declared_capacities()
        }
    )
    return replace(config, graph=replace(config.graph, capacities=tuple(buckets)))


def context_request(config: TrainConfig, world: int, device: torch.device) -> ContextRequest:
    """Request for the plan of a step. world: processes of the run. device: says which attention
    kernels run.

    A step has as many microbatches as its tokens fill (`run.tokens_per_step`, rounded up).
    """
    parallel, tokens = config.parallel, rank_tokens(config)
    assert tokens is not None
    plane = parallel.layout().replicas(world) * parallel.cp
    return ContextRequest(
        world=plane,
        tokens=tokens,
        sizes=parallel.context_sizes,
        places=tuple(capacity.documents for capacity in config.graph.packing_capacities()),
        microsteps=-(-config.run.tokens_per_step // (plane * tokens)),
        cost=context_cost(
            config.model,
            parallel.tp,
            kernels_cost(config, device),
            zigzag_sizes(context_choices(config)),
        ),
    )


def kernels_cost(config: TrainConfig, device: torch.device | None) -> CostModel:
    """The measured cost of the attention kernels that a run has on `device`; None: not known, so
    that `auto` is none of the fast ones."""
    backend = config.model.attention_backend
    if backend == "auto" and device is not None:
        dtype = getattr(torch, config.run.dtype)
        backend = choose_backend(device, dtype, *head_sizes(config.model)).name
    return FLASH4 if backend == "flash" else CostModel()


def decoder_cost(
    model: DecoderConfig, parts: int = 1, measured: CostModel | None = None
) -> CostModel:
    """The measured model's cost scaled to `model`: launches by layers, tokens by weights, attention
    by heads.

    parts: ranks that share heads and columns (tp), or rows and in attention heads (cp). measured:
    cost of the measured model, with torch's varlen attention by default.
    """
    measured = measured or CostModel()
    layers = model.depth / MEASURED_LAYERS
    attending = model.count("attn") / MEASURED_LAYERS
    heads = attending * model.num_heads * sum(head_sizes(model)) / 2 / MEASURED_HEADS / parts
    weights = token_weights(model) + head_weights(model)  # that every token is multiplied by
    return CostModel(
        microbatch_us=measured.microbatch_us * layers,
        token_us=measured.token_us * weights / MEASURED_WEIGHTS / parts,
        document_us=measured.document_us * heads,
        tile_us=measured.tile_us * heads,
        attention_us=measured.attention_us * heads,
        capture_layer_seconds=measured.capture_layer_seconds,
    )


def context_cost(
    model: DecoderConfig, parts: int, kernels: CostModel, zigzag: tuple[int, ...] = ()
) -> ContextCost:
    """`decoder_cost` and what groups exchange: by heads what every branch exchanges
    (`models/branches.py`), in zigzag keys and values alone.

    parts: ranks that share heads (tp). zigzag: sizes of groups whose rows are cut so. Latent
    attention exchanges keys and values of all heads.
    """
    counted = [(model.count(name), kind) for name, kind in model.kinds().items()]
    columns = sum(count * kind.exchanged_columns(model) for count, kind in counted)
    key_heads = model.num_heads if model.latent.enabled else model.num_kv_heads
    gathered = model.count("attn") * key_heads * sum(head_sizes(model))
    measured = MEASURED_LAYERS * 2 * MEASURED_HEADS
    return ContextCost.of(
        decoder_cost(model, parts, kernels),
        zigzag=zigzag,
        group_us=GROUP_US * sum(n for n, kind in counted if kind.is_mixer) / MEASURED_LAYERS,
        exchange_us=EXCHANGE_US * columns / (measured * (1 + MEASURED_KV_SHARE)) / parts,
        gather_us=GATHER_US * (gathered / (measured * MEASURED_KV_SHARE)) / parts,
    )


# Times are scaled from one measured model, Qwen3-0.6B in bf16 on one H200 (the defaults of
# `CostModel`), so absolute numbers are a guide; which buckets are chosen depends on ratios only.
MEASURED_LAYERS, MEASURED_HEADS, MEASURED_WEIGHTS = 28, 16 * 128, 596_000_000
MEASURED_KV_SHARE = 0.5  # of the measured model: heads of keys and values per head of queries
ROWS = 2  # in a run, as in a step: the host's way to the first one does not count as much
RUNS = 2  # that count, after one that does not
SHORT = 32  # tokens of short documents, at least
WEIGHT = 1e-4  # of the estimates in the fit: rows are few, and estimates may be off by factors

TimeRow = Callable[[PackedBatch], float]
Slowest = Callable[[float], float]
RunStep = Callable[[Sequence[PackedBatch], int], object]


def is_wanted(wish: bool | str, device: torch.device, deterministic: bool) -> bool:
    """Tells whether to time rows. wish: as of `parallel.time_rows`; auto = on CUDA, where times
    mean something, and not in a run that is to give the same bits again, since other times may make
    other plans."""
    return device.type == "cuda" and not deterministic if wish == "auto" else bool(wish)


def sample_rows(request: ContextRequest, vocabulary: int) -> list[tuple[int, PackedBatch]]:
    """Rows to be timed, with their numbers of ranks, largest first: of every size one with a single
    document, and one with short documents for the fewest and for the most places. Tokens are drawn,
    so that experts are about equally busy; the same on all ranks."""
    draw, rows = np.random.default_rng(0), list[tuple[int, PackedBatch]]()
    for size in reversed(request.sizes):
        tokens = size * request.tokens
        multiple = document_multiple("zigzag" if size in request.cost.zigzag else "ulysses", size)
        contents = [(request.places[0], [tokens])]
        for places in dict.fromkeys((request.places[0], request.places[-1])):
            short = min(tokens, -(-max(SHORT, tokens // places) // multiple) * multiple)
            contents.append((places, [short] * min(places, tokens // short)))
        rows += [
            (
                size,
                PackedBatch.build(
                    [draw.integers(vocabulary, size=length) for length in lengths],
                    Capacity(tokens, places),
                ),
            )
            for places, lengths in contents
        ]
    return rows


@dataclass(frozen=True)
class MeasuredCost:
    """cost: what plans go by from now on, None where nothing sensible was found. note: for
    people."""

    cost: ContextCost | None
    note: str


def measured_cost(request: ContextRequest, vocabulary: int, time_row: TimeRow) -> MeasuredCost:
    """The costs of `request` fitted to rows. time_row: microseconds of forward and backward of a
    row, on the slowest rank, while all ranks run the same row in groups of its size; called in the
    same order everywhere."""
    timings = [
        RowTiming(
            size,
            request.tokens,
            row.capacity.documents,
            sum(length * length for length in row.lengths),
            time_row(row),
        )
        for size, row in sample_rows(request, vocabulary)
    ]
    try:
        cost = fit(timings, _scaled(request.cost, timings), weight=WEIGHT)
    except ValueError as error:
        return MeasuredCost(
            None, f"rows were timed, but no costs explain them ({error}); plans go on by estimates"
        )
    errors = [
        abs(cost.row_us(row.size, row.tokens, row.places, row.pairs) / row.us - 1)
        for row in timings
    ]
    spans = []
    for size in request.sizes:
        of_size = sorted(timing.us / 1000 for timing in timings if timing.size == size)
        spans.append(
            f"{size} rank{'s' if size > 1 else ''} {of_size[0]:.3g} to {of_size[-1]:.3g} ms"
        )
    return MeasuredCost(
        cost,
        f"rows were timed: {', '.join(spans)}; plans go by these from here on (fitted within "
        f"{max(errors):.0%})",
    )


def _scaled(cost: ContextCost, timings: Sequence[RowTiming]) -> ContextCost:
    """`cost` times the one factor that explains `timings` best: how much slower this machine is as
    a whole, which a fit near the estimates would not find."""
    shares = [cost.row_us(row.size, row.tokens, row.places, row.pairs) / row.us for row in timings]
    factor = sum(shares) / sum(share * share for share in shares)
    return replace(cost, **{name: factor * getattr(cost, name) for name in COEFFICIENTS})


def time_row(run_step: RunStep, device: torch.device, slowest: Slowest) -> TimeRow:
    """Times rows by what runs the microbatches of a step, given their loss tokens. Gradients are
    added to `.grad`. slowest: see `slowest_rank`."""

    def timed(row: PackedBatch) -> float:
        times = []
        for number in range(RUNS + 1):
            synchronize(device)
            slowest(0.0)  # a common start
            began = time.perf_counter()
            run_step([row] * ROWS, row.num_tokens)
            synchronize(device)
            if number:
                times.append(1e6 * (time.perf_counter() - began) / ROWS)
        return slowest(statistics.median(times))

    return timed


def slowest_rank(mesh: Mesh) -> Slowest:
    """The largest number of all ranks; waits for all of them."""
    return lambda number: max(gather_numbers(mesh.everyone(), [number]))[0]


@contextlib.contextmanager
def undisturbed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Buffers and random states are put back after what is run within."""
    buffers = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    random = random_states(device)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        set_random_states(random, device)
