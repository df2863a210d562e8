"""`packgraph plan memory PRESET`: time against memory of recomputation, offloading and both, for one
row, from the shape of the model. Nothing is run.

    held     weights + gradients + optimizer state
    kept     what all layers keep for the backward, or have on the host        per token
    working  what one layer computes again, and the head

Times are those of the products, attention and scans at the device's speed, copies beside them. The
estimates of activations are those of `DecoderMemory`, within 15 % of what Qwen3-0.6B took.

With `--world N`, ways to spread a run over N ranks, what each takes of a rank's memory, and how fast
it should be:

    layouts      dp x pp x cp x tp, ep of dp        those that `validate` has no reason against
    shard        none, gradients, parameters    over all replicas, or over those of a host
    activations  kept, recomputed, on the host      as above
         └────▶ bytes of the fullest rank ─▶ fits? ─▶ seconds of a step ─▶ the fastest first

A step is computation at the device's speed and what ranks wait for: each axis sends so many bytes
over the slowest link that its ranks span. Ranks of one host are consecutive, and tp lies innermost.

    axis    bytes of one rank, for every layer and microbatch
    tp      8 rows of hidden numbers, x (tp - 1) / tp: gather and scatter, around attention and mlp
    cp      queries, keys, values, outputs, forward and backward, x (cp - 1) / cp
    ep      rows of the chosen experts, there and back, forward and backward
    pp      one row forward, one back, between stages; and the pipeline's idle time
    dp      once a step: the gradients' sum behind the last backward, and new parameters
    shard   the matrices of all layers, gathered twice and reduced once, while other layers run
    new     once a step, where gradients alone are sharded: what all matrices are now
    across  once a step, where hosts share no layers: what is kept, summed and gathered anew

Which way is faster is what these numbers are for. They know no contention, no latency and no
kernel's efficiency at a small shape.
"""  # noqa: E501

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from packgraph.models.branches import forward_operations
from packgraph.models.decoder import end_units, layer_matrices
from packgraph.models.recompute import FULL, KINDS, NONE, SELECTIVE
from packgraph.packing.batch import count_pairs
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import SHARDS, Layout, Shard, powers_of_two
from packgraph.train.build import with_shape
from packgraph.train.config.planning import PlanMemoryArguments
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import (
    ITEMSIZE,
    GraphConfig,
    OffloadConfig,
    ParallelConfig,
    TrainConfig,
)
from packgraph.train.memory import (
    Need,
    activation_bytes,
    kept_columns,
    need_of,
    planned_state,
    without_host_state,
)
from packgraph.train.updates import adamw, adamw8bit
from packgraph.train.validate import validate
from packgraph.viz.drawing import aligned

# Recomputation, and whether what is kept waits on the host: all of it, or the inputs of layers,
# since results that are kept selectively do not pass the hooks of offloading.
ACTIVATIONS = [(kind, offload) for offload in (False, True) for kind in KINDS]
MOVES = {True: "everything", False: "layer_input"}  # by whether nothing is recomputed
FITS = {None: "-", True: "yes", False: "no"}
BYTES_AGAIN = 4  # of a result that selective recomputation makes: operands are read, it is written


@dataclass(frozen=True)
class MemoryChoice:
    """One way to hold activations. device, host: bytes there at the peak; time: over that of
    keeping everything. fits: None where the device's memory is not known."""

    recompute: str
    offload: bool
    device: int
    host: int
    time: float
    fits: bool | None


def memory_choices(config: TrainConfig, asked: PlanMemoryArguments) -> list[MemoryChoice]:
    """All choices for a row, none first."""
    capacity, limit = Capacity(asked.tokens, 1), asked.limit()
    sized = replace(
        config,
        graph=replace(config.graph, enabled=False, capacities=(capacity,)),
        parallel=ParallelConfig(),
    )
    state, (forward_s, again_s) = need_of(sized, "cuda").state, row_work(config, asked)
    whole, found = need_of(without_host_state(sized), "cuda").optimizer, list[MemoryChoice]()
    for kind, offload in ACTIVATIONS:
        of_kind = replace(sized, run=replace(config.run, recompute=kind))
        kept = activation_bytes(of_kind, capacity, 1, offload)
        copy_s = kept.moved / (asked.gb_s * 1e9)
        spent = max(forward_s, copy_s) + max(2 * forward_s + again_s[kind], copy_s)
        peak = state + kept.device
        stays, away = planned_state(sized, whole, peak, limit)
        fits = None if limit is None else peak + stays <= limit
        time, host = spent / (3 * forward_s), kept.moved + away
        found.append(MemoryChoice(kind, offload, peak + stays, host, time, fits))
    return found


def row_work(config: TrainConfig, asked: PlanMemoryArguments) -> tuple[float, dict[str, float]]:
    """Estimates the cost of one whole row on one device: seconds of the forward of all layers, and
    those of the second one by the kind of recomputation."""
    model, tokens, length = config.model, asked.tokens, asked.length or asked.tokens
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    operations = forward_operations(model, tokens, count_pairs(lengths), head=False)
    forward = operations / (asked.tflops * 1e12)
    cheap = kept_columns(model, NONE) - kept_columns(model, SELECTIVE)
    cheap *= ITEMSIZE[config.run.dtype] * tokens
    again = {NONE: 0.0, SELECTIVE: BYTES_AGAIN * cheap / (asked.device_gb_s * 1e9), FULL: forward}
    return forward, again


def run_plan_memory(asked: RunRequest, own: PlanMemoryArguments) -> int:
    """Run `packgraph plan memory`; returns the exit code. Raises ConfigError."""
    print(plan_memory_choices(with_shape(asked)[0], own), end="")
    return 0


def plan_memory_choices(config: TrainConfig, asked: PlanMemoryArguments) -> str:
    """The table, or JSON."""
    if asked.world is not None:
        return _plan_world(config, asked, asked.world)
    choices = memory_choices(config, asked)
    if asked.json:
        return json.dumps([asdict(choice) for choice in choices], indent=2) + "\n"
    title = (
        f"{config.preset}, {config.model.num_layers} layers, a row of {asked.tokens:,} tokens, "
        f"{config.run.dtype}: estimates"
    )
    rows: Sequence[Sequence[str]] = [
        ("recompute", "offload", "device GiB", "host GiB", "time of none", "fits"),
        *(
            (
                choice.recompute,
                MOVES[choice.recompute == NONE] if choice.offload else "-",
                f"{choice.device / 2**30:.1f}",
                f"{choice.host / 2**30:.1f}",
                f"{choice.time:.2f}",
                FITS[choice.fits],
            )
            for choice in choices
        ),
    ]
    told = []
    if asked.memory is not None:
        told = ["", *(_automatic([one for one in choices if one.offload == o]) for o in (0, 1))]
    return "\n".join([title, "", *aligned(rows), *told]) + "\n"


def _automatic(choices: Sequence[MemoryChoice]) -> str:
    """Tells what `run.recompute = auto` chooses among these, the least recomputation first."""
    chosen = next((choice.recompute for choice in choices if choice.fits), choices[-1].recompute)
    also = "" if any(choice.fits for choice in choices) else ", which does not fit"
    moving = (
        "with everything on the host that may move" if choices[0].offload else "without offloading"
    )
    return f"--run.recompute auto, {moving}: {chosen}{also}"


def _plan_world(config: TrainConfig, asked: PlanMemoryArguments, world: int) -> str:
    """The fastest ways to spread the run over `world` GPUs. Raises ConfigError where none is
    legal."""
    choices = world_choices(config, world, asked)
    if not choices:
        raise ConfigError([f"--world: no layout of {world} GPUs is there for this run"])
    if asked.json:
        return json.dumps([asdict(choice) for choice in choices[: asked.top]], indent=2) + "\n"
    fitting = sum(choice.fits is not False for choice in choices)
    title = (
        f"{config.preset} on {world:,} GPUs, rows of {asked.tokens:,} tokens, "
        f"{asked.step_tokens or world * asked.tokens:,} a step, {config.run.dtype}: "
        f"{len(choices)} ways, {fitting} fit; estimates"
    )
    head = ("dp", "pp", "cp", "tp", "ep", "shard", "recompute", "offload", "device GiB", "host GiB")
    rows: list[Sequence[str]] = [
        (*head, "GB sent", "waits", "tokens/s and GPU", "fits"),
        *(
            (
                *(str(getattr(choice, axis)) for axis in ("dp", "pp", "cp", "tp", "ep")),
                choice.shard + (f"/{choice.shard_ranks}" if choice.shard_ranks else ""),
                choice.recompute,
                "yes" if choice.offload else "-",
                f"{choice.device / 2**30:.1f}",
                f"{choice.host / 2**30:.1f}",
                f"{sum(choice.sent.values()) / 1e9:.1f}",
                f"{choice.waits:.0%}",
                f"{choice.tokens_per_second:,.0f}",
                FITS[choice.fits],
            )
            for choice in choices[: asked.top]
        ),
    ]
    return "\n".join([title, "", *aligned(rows)]) + "\n"


@dataclass(frozen=True)
class WorldChoice:
    """One way to run. shard_ranks: that share a layer, 0 = all. device, host: bytes at the peak of
    the fullest rank. seconds: of a step. sent: bytes that a rank sends in a step, by axis. waits:
    share of the step in which ranks wait for links and stages. fits: None where the device's memory
    is not known."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int
    shard: Shard
    shard_ranks: int
    recompute: str
    offload: bool
    device: int
    host: int
    seconds: float
    tokens_per_second: float
    sent: dict[str, int]
    waits: float
    fits: bool | None


def world_choices(config: TrainConfig, world: int, asked: PlanMemoryArguments) -> list[WorldChoice]:
    """All legal ways to train on `world` ranks, those that fit first, the fastest of them first.

    Args:
        config: Model, dtype and everything else that is not chosen here.
        world: Number of ranks.
        asked: Rows, which the ranks of a context share, and devices and links.
    """
    found: list[WorldChoice] = []
    tokens, work = asked.tokens, row_work(config, asked)
    for layout, replicas in _layouts(config, world):
        rows = -(-(asked.step_tokens or world * tokens) // (tokens * replicas))
        for shard, within in _ways_to_shard(layout, asked.per_host):
            laid = replace(layout, shard_ranks=within)
            plain = _spread(config, laid, shard, NONE, False, tokens)
            if validate(plain, "cuda", None, world):
                continue
            whole = replace(plain, parallel=replace(plain.parallel, shard="none", shard_ranks=0))
            need, held = _need(plain, world), _need(whole, world).weights
            optimizer = _need(without_host_state(plain), world).optimizer
            for recompute, offload in ACTIVATIONS:
                spread = _spread(config, laid, shard, recompute, offload, tokens)
                if not validate(spread, "cuda", None, world):
                    found.append(_choice(spread, need.state, held, optimizer, rows, work, asked))
    return sorted(found, key=lambda choice: (choice.fits is False, choice.seconds, choice.device))


def _layouts(config: TrainConfig, world: int) -> Iterator[tuple[Layout, int]]:
    """Layouts, all axes but dp of powers of two, with their replicas."""
    model = config.model
    experts = model.experts.count if model.experts.enabled else 1
    for tp in _sizes(world, model.num_heads):
        for cp in _sizes(world // tp, model.num_heads // tp):
            for pp in _sizes(world // (tp * cp), model.num_layers):
                replicas = world // (tp * cp * pp)
                for ep in _sizes(replicas, experts):
                    yield Layout(dp=replicas, pp=pp, cp=cp, tp=tp, ep=ep), replicas


def _ways_to_shard(layout: Layout, per_host: int) -> Iterator[tuple[Shard, int]]:
    """Yields what of layers is sharded, and over how many ranks, 0 = all: those of a host, too."""
    copies = (layout.dp or 1) * layout.cp
    on_host = sum(first // per_host == 0 for first in _copies(layout)) if copies > 1 else 1
    for shard in SHARDS if copies > 1 else SHARDS[:1]:
        yield shard, 0
        if shard != "none" and 1 < on_host < copies:
            yield shard, on_host


def _copies(layout: Layout) -> list[int]:
    """The ranks that hold the parameters that rank 0 holds."""
    return [
        dp * layout.inner + cp * layout.tp
        for dp in range(layout.dp or 1)
        for cp in range(layout.cp)
    ]


def _sizes(ranks: int, most: int) -> list[int]:
    """Powers of two up to `most` that divide `ranks`."""
    return [size for size in powers_of_two(ranks) if size <= max(1, most)]


def _spread(
    config: TrainConfig,
    layout: Layout,
    shard: Shard,
    recompute: str,
    offload: bool,
    tokens: int,
) -> TrainConfig:
    """The run in that layout, with graphs of chunks of one shape."""
    modules = ("layer_input",) if recompute != NONE else config.offload.modules or ("core_attn",)
    return replace(
        config,
        run=replace(config.run, recompute=recompute),
        graph=replace(
            config.graph,
            enabled=True,
            granularity="chunk",
            scope=GraphConfig().scope,
            capacities=(Capacity(tokens, 1),),
        ),
        offload=replace(config.offload, modules=modules) if offload else OffloadConfig(),
        parallel=replace(
            ParallelConfig(),
            dp=layout.dp,
            pp=layout.pp,
            cp=layout.cp,
            tp=layout.tp,
            ep=layout.ep,
            shard=shard,
            shard_ranks=layout.shard_ranks,
        ),
    )


def _choice(
    config: TrainConfig,
    state: int,
    held: int,
    optimizer: int,
    rows: int,
    work: tuple[float, dict[str, float]],
    asked: PlanMemoryArguments,
) -> WorldChoice:
    """One way, with bytes of the fullest rank. held: of its weights if nothing were sharded.
    optimizer: of all of its state, wherever that is."""
    parallel, recompute = config.parallel, config.run.recompute
    layout, offload = parallel.layout(), bool(config.offload.modules)
    (capacity,) = config.graph.captured_capacities()
    kept = activation_bytes(config, capacity, rows, offload)
    parts = layout.tp * layout.cp * layout.pp
    forward, again = work[0] / parts, work[1][recompute] / parts
    copies, limit = kept.moved / (asked.gb_s * 1e9), asked.limit()
    per_row = max(forward, copies) + max(2 * forward + again, copies)
    sent, waited = _sent(config, held, rows, forward, 2 * forward + again, asked)
    bubble = (layout.pp - 1) / parallel.chunks * per_row
    eight = config.optimizer.name == "adamw8bit"
    passes = adamw8bit.PASSES if eight else adamw.PASSES[config.run.dtype]
    peak = state + kept.device
    stays, away = planned_state(config, optimizer, peak, limit)
    # The state is read and written; what is on the host travels in both directions at once.
    update = max(2 * passes * optimizer / (asked.device_gb_s * 1e9), away / (asked.gb_s * 1e9))
    seconds = rows * per_row + bubble + sum(waited.values()) + update
    device = peak + stays
    return WorldChoice(
        dp=layout.dp or 1,
        pp=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        shard=parallel.known_shard,
        shard_ranks=parallel.shard_ranks,
        recompute=recompute,
        offload=offload,
        device=device,
        host=kept.moved * min(layout.pp, rows) + away,
        seconds=seconds,
        tokens_per_second=rows * capacity.tokens / seconds / layout.inner,
        sent={axis: round(size) for axis, size in sent.items() if size},
        waits=(bubble + sum(waited.values())) / seconds,
        fits=None if limit is None else device <= limit,
    )


def _sent(
    config: TrainConfig,
    held: int,
    rows: int,
    forward: float,
    backward: float,
    asked: PlanMemoryArguments,
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a rank sends in a step, and seconds that it waits for them, by axis.

    held: bytes of its weights if nothing were sharded. forward, backward: seconds of a row's."""
    model, parallel = config.model, config.parallel
    layout, shard = parallel.layout(), parallel.known_shard
    (capacity,) = config.graph.captured_capacities()
    itemsize = ITEMSIZE[config.run.dtype]
    layers = -(-model.depth // layout.pp)
    row = capacity.tokens // layout.cp * model.hidden_size * itemsize
    again = 1.5 if config.run.recompute == FULL else 1.0
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    experts = model.experts
    chosen = experts.per_token * model.count("moe") / layout.pp if experts.enabled else 0.0
    dense, of_experts = (sum(sizes) for sizes in zip(*layer_matrices(model), strict=True))
    ends = end_units(model) // min(2, layout.pp) * model.vocab_size * model.hidden_size
    matrices = (dense / layout.tp + of_experts / layout.ep) / layout.pp + ends / layout.tp
    matrices = round(matrices * itemsize) if shard != "none" else 0
    whole = held - matrices  # of weights whose gradients are summed once a step
    copies, within = (layout.dp or 1) * layout.cp, layout.sharers()
    every = layout.inner * (layout.dp or 1)
    sums = 4 if config.gradient_dtype(every) == "float32" else 2
    reduced = sums / itemsize  # gradients beside parameters, in the dtype of their sums
    times = reduced + (2 if shard == "parameters" else 0)
    sent = {
        "tp": rows * layers * 8 * again * row * _others(layout.tp),
        "cp": rows * layers * 2 * again * row / model.hidden_size * heads * _others(layout.cp),
        "ep": rows * 4 * again * row * chosen * _others(layout.ep),
        "pp": rows * 2.0 * row if layout.pp > 1 else 0.0,
        "dp": (1 + reduced) * whole * _others(copies),
        "shard": rows * times * matrices * _others(within),
        "new": matrices * _others(within) if shard == "gradients" else 0.0,
        "across": matrices / within * (1 + reduced) * _others(copies // within),
    }
    span = {
        "tp": layout.tp,
        "cp": layout.tp * layout.cp,
        "pp": layout.tp * layout.cp * layout.pp,
        "ep": layout.inner * layout.ep,
        **dict.fromkeys(("dp", "across"), every),
        **dict.fromkeys(("shard", "new"), _copies(layout)[within - 1] + 1),
    }
    waited = {axis: bytes_ / asked.link(span[axis]) for axis, bytes_ in sent.items()}
    # The sum of gradients is hidden behind the last backward, new parameters are waited for. Layers
    # that are sharded gather and reduce while another layer runs.
    waited["dp"] += max(0.0, waited["dp"] / 2 - backward) - waited["dp"] / 2
    waited["shard"] = max(0.0, waited["shard"] - rows * (forward + backward))
    return sent, waited


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _need(config: TrainConfig, world: int) -> Need:
    """Need of the fullest rank, one of the first or of the last stage."""
    layout = config.parallel.layout()
    last = (layout.pp - 1) * layout.cp * layout.tp
    return max((need_of(config, "cuda", world, rank) for rank in {0, last}), key=lambda n: n.state)
