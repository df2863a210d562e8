"""`packgraph plan memory PRESET --world N`: ways to spread a run over N ranks, what each takes of
a rank's memory, and how fast it should be. Nothing is run.

    layouts      dp x pp x cp x tp, ep of dp        those that `validate` has no reason against
    shard        none, gradients, parameters    over all replicas, or over those of a host
    activations  kept, recomputed, on the host      as `plan_memory.py`
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
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from packgraph.models.decoder import end_units, layer_matrices
from packgraph.models.recompute import FULL, KINDS, NONE
from packgraph.packing.capacity import Capacity
from packgraph.parallel.flat_buffers import SHARDS, Shard
from packgraph.parallel.mesh import Layout
from packgraph.train.config.sections import GraphConfig, OffloadConfig, ParallelConfig, TrainConfig
from packgraph.train.memory import Need, need_of
from packgraph.train.predicted_peak import activation_bytes
from packgraph.train.resident_state import planned_state, without_host_state
from packgraph.train.updates import adamw, adamw8bit
from packgraph.train.validate import validate


@dataclass(frozen=True)
class Speeds:
    """Speeds of a rank. tflops: of products, in 10^12 operations a second; the others in 10^9 bytes
    a second: device: of its memory, copies: to the host, host: to ranks of the same host, of which
    there are `per_host`, net: to others."""

    tflops: float
    device: float
    copies: float
    host: float
    net: float
    per_host: int

    def link(self, span: int) -> float:
        """Bytes a second between ranks that lie within `span` consecutive ones."""
        return 1e9 * (self.host if span <= self.per_host else self.net)


@dataclass(frozen=True)
class RowWork:
    """Cost of one whole row on one device. forward_s: seconds. again_s: those of the second
    forward, by the kind of recomputation."""

    forward_s: float
    again_s: dict[str, float]


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


def world_choices(
    config: TrainConfig,
    world: int,
    tokens: int,
    step_tokens: int,
    work: RowWork,
    speeds: Speeds,
    limit: int | None,
) -> list[WorldChoice]:
    """All legal ways to train rows of `tokens` on `world` ranks, those that fit first, the fastest
    of them first.

    Args:
        config: Model, dtype and everything else that is not chosen here.
        world: Number of ranks.
        tokens: Tokens of a row, which the ranks of a context share.
        step_tokens: Tokens of a step, over all ranks.
        work: What such a row costs.
        speeds: Of the devices and links.
        limit: Bytes of a device; None = not known.
    """
    found: list[WorldChoice] = []
    for layout, replicas in _layouts(config, world):
        rows = -(-step_tokens // (tokens * replicas))
        for shard, within in _ways_to_shard(layout, speeds.per_host):
            laid = replace(layout, shard_ranks=within)
            plain = _spread(config, laid, shard, NONE, False, tokens)
            if validate(plain, "cuda", None, world):
                continue
            need, held = _need(plain, world), _need(_whole(plain), world).weights
            optimizer = _need(without_host_state(plain), world).optimizer
            for recompute, offload in activation_choices():
                spread = _spread(config, laid, shard, recompute, offload, tokens)
                if not validate(spread, "cuda", None, world):
                    sizes = _Sizes(need, held, optimizer)
                    found.append(_choice(spread, sizes, rows, work, speeds, limit))
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
    found, size = [1], 2
    while size <= most and ranks % size == 0:
        found.append(size)
        size *= 2
    return found


def activation_choices() -> Iterator[tuple[str, bool]]:
    """Recomputation, and whether what is kept waits on the host: all of it, or the inputs of
    layers, since results that are kept selectively do not pass the hooks of offloading."""
    for offload in (False, True):
        for kind in KINDS:
            yield kind, offload


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


class _Sizes(NamedTuple):
    """Bytes of the fullest rank. held: of its weights if nothing were sharded. optimizer: of all
    of its state, wherever that is."""

    need: Need
    held: int
    optimizer: int


def _choice(
    config: TrainConfig,
    sizes: _Sizes,
    rows: int,
    work: RowWork,
    speeds: Speeds,
    limit: int | None,
) -> WorldChoice:
    parallel, recompute = config.parallel, config.run.recompute
    layout, offload = parallel.layout(), bool(config.offload.modules)
    (capacity,) = config.graph.captured_capacities()
    kept = activation_bytes(config, capacity, rows, offload)
    parts = layout.tp * layout.cp * layout.pp
    forward, again = work.forward_s / parts, work.again_s[recompute] / parts
    copies = kept.moved / (speeds.copies * 1e9)
    per_row = max(forward, copies) + max(2 * forward + again, copies)
    sent, waited = _sent(config, sizes.held, rows, forward, 2 * forward + again, speeds)
    bubble = (layout.pp - 1) / parallel.chunks * per_row
    eight = config.optimizer.name == "adamw8bit"
    passes = adamw8bit.PASSES if eight else adamw.PASSES[config.run.dtype]
    peak = sizes.need.state + kept.device
    stays, away = planned_state(config, sizes.optimizer, peak, limit)
    update = 2 * passes * sizes.optimizer / (speeds.device * 1e9)  # is read and written
    update = max(update, away / (speeds.copies * 1e9))  # in both directions at once
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
    config: TrainConfig, held: int, rows: int, forward: float, backward: float, speeds: Speeds
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a rank sends in a step, and seconds that it waits for them, by axis.

    held: bytes of its weights if nothing were sharded. forward, backward: seconds of a row's."""
    model, parallel = config.model, config.parallel
    layout, shard = parallel.layout(), parallel.known_shard
    (capacity,) = config.graph.captured_capacities()
    itemsize = 4 if config.run.dtype == "float32" else 2
    layers = -(-model.depth // layout.pp)
    row = capacity.tokens // layout.cp * model.hidden_size * itemsize
    again = 1.5 if config.run.recompute == FULL else 1.0
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    experts = model.experts
    chosen = experts.per_token * model.count("moe") / layout.pp if experts.enabled else 0.0
    dense, of_experts = (sum(sizes) for sizes in zip(*layer_matrices(model), strict=True))
    ends = end_units(model) // min(2, layout.pp) * model.vocab_size * model.hidden_size
    matrices = (dense / layout.tp + of_experts / layout.ep) / layout.pp + ends / layout.tp
    matrices *= itemsize
    matrices = round(matrices) if shard != "none" else 0
    whole = held - matrices  # of weights whose gradients are summed once a step
    copies, within = (layout.dp or 1) * layout.cp, layout.sharers()
    every = layout.inner * (layout.dp or 1)
    sums = 4 if config.gradient_dtype(every) == "float32" else 2
    reduced = sums / itemsize  # gradients beside parameters, in the dtype of their sums
    across = matrices / within * (1 + reduced) * _others(copies // within)
    times = reduced + (2 if shard == "parameters" else 0)
    sent = {
        "tp": rows * layers * 8 * again * row * _others(layout.tp),
        "cp": rows * layers * 2 * again * row / model.hidden_size * heads * _others(layout.cp),
        "ep": rows * 4 * again * row * chosen * _others(layout.ep),
        "pp": rows * 2.0 * row if layout.pp > 1 else 0.0,
        "dp": (1 + reduced) * whole * _others(copies),
        "shard": rows * times * matrices * _others(within),
        "new": matrices * _others(within) if shard == "gradients" else 0.0,
        "across": across,
    }
    span = {
        "tp": layout.tp,
        "cp": layout.tp * layout.cp,
        "pp": layout.tp * layout.cp * layout.pp,
        "ep": layout.inner * layout.ep,
        "dp": every,
        "across": every,
    }
    span["shard"] = span["new"] = _copies(layout)[within - 1] + 1
    waited = {axis: bytes_ / speeds.link(span[axis]) for axis, bytes_ in sent.items()}
    # The sum of gradients is hidden behind the last backward, new parameters are waited for. Layers
    # that are sharded gather and reduce while another layer runs.
    waited["dp"] += max(0.0, waited["dp"] / 2 - backward) - waited["dp"] / 2
    waited["shard"] = max(0.0, waited["shard"] - rows * (forward + backward))
    return sent, waited


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _whole(config: TrainConfig) -> TrainConfig:
    return replace(config, parallel=replace(config.parallel, shard="none", shard_ranks=0))


def _need(config: TrainConfig, world: int) -> Need:
    """Need of the fullest rank, one of the first or of the last stage."""
    layout = config.parallel.layout()
    last = (layout.pp - 1) * layout.cp * layout.tp
    return max((need_of(config, "cuda", world, rank) for rank in {0, last}), key=lambda n: n.state)
