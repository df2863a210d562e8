"""Memory of a run, known before it is taken: its graphs, within a budget; and the least that the
whole run needs.

    largest capacity ─▶ trial capture of every chunk ─▶ within the budget? ─▶ capture
           ▲                                                    │ no
           └────── dropped: its microbatches run eagerly ◀──────┘

A slot's pool is as large as its largest bucket needs, so only dropping the largest helps, and
tracing it is enough. The trace takes the memory of one eager microbatch of that capacity, which a
run needs in any case (a microbatch that has no graph runs eagerly), then that of its graphs in one
slot. What is decided is the same on all ranks: all of them measure, and one that has no room
decides for all.

What a run takes at least is held against what there is before anything is allocated:

    weights + gradients + optimizer state     from the shapes of this rank's part of the model
    one microbatch                            estimated from the shape; SURE of it is certain
    its graphs, on the CPU                    as much again: the recorder's pool beside what eager
                                              warm-up has left

A run that cannot fit would fill the machine until the system ends it (and others) without a word. A
run that may fit must not be refused, so only what is certain counts: of a microbatch, what autograd
saves. In six small decoders on the CPU that was 0.75 to 3.7 times the estimate of
`DecoderMemory`; four whole runs there took 1.05 to 1.14 times `Need.total`.

`available_memory` is what a process may still take: of the device, or of the host within the limits
of its control groups.

A container or a batch system limits a process to less than the machine has. The kernel ends what
takes more without a word, so the smallest of all limits counts. Caches of files do not: the kernel
gives them up first.

The peak of a step (`predicted_peak`) is predicted from shapes alone; activations are those of
`DecoderMemory`, within 15 % of what Qwen3-0.6B took:

    state      weights, gradients, optimizer state: `need_of`
    near       what layers keep for the backward, of all microbatches in flight
    working    what one layer computes again
    head       logits, and what the loss keeps

With `--optimizer.offload` the state that fits beside it stays on the device (`resident_bytes`):

    device   | weights, gradients, activations: `predicted_peak` | state that stays | spare |
    host                                                           the rest of the state

Some of the memory is spare (`SHARE`). `--optimizer.resident` says a size instead. Ranks may come to
different amounts: neither bits nor checkpoints depend on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from packgraph.graphs.agreement import Consensus, alone
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import OVER_BUDGET
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.key import CapturedCapacities
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.budget import budget_bytes, shown
from packgraph.graphs.memory.trial import BankMemory, trial_memory
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.undone import explained
from packgraph.models.branches import head_weights
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import (
    ModelChunks,
    end_units,
    layer_matrices,
    stage_layers,
    stage_weights,
)
from packgraph.models.recompute import FULL, KINDS, NONE, SELECTIVE
from packgraph.ops.float8.cast import BLOCK
from packgraph.ops.float8.linear import FLOAT8_GRADIENTS, MXFP8, is_float8
from packgraph.ops.loss import rows_per_chunk
from packgraph.packing.capacity import Capacity, in_short
from packgraph.parallel.flat_buffers import ALIGNMENT, take_turns
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.reading import one_problem
from packgraph.train.config.sections import ITEMSIZE, TrainConfig
from packgraph.train.features.context import stage_tokens
from packgraph.train.features.live import live_shape
from packgraph.train.updates import adamw, adamw8bit, muon
from packgraph.train.updates.host_state import BUFFERS, PIECE

Arguments = Callable[[int, Capacity], tuple[Any, ...]]
Agree = Callable[[bool], bool]


def limit_of(budget: str | None, device: torch.device) -> int | None:
    """The bytes of a budget on `device`, None where there is none. Raises ValueError as
    `budget_bytes`."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return None if budget is None else budget_bytes(budget, total)


@dataclass(frozen=True)
class MemoryPlan:
    """Capacities to capture. kept: capacities, smallest first. dropped: those over the budget.
    banks: the prediction for each chunk of this rank, empty where there is none. notes: what is to
    be said of it.
    """

    kept: tuple[Capacity, ...]
    dropped: tuple[Capacity, ...] = ()
    banks: tuple[BankMemory, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def pools(self) -> int:
        """Predicted bytes of all pools of this rank."""
        return sum(bank.pools for bank in self.banks)

    def summary(self, measured: int) -> dict[str, Any]:
        """Entry of summary.json. measured: bytes that the pools hold."""
        dropped = [in_short(capacity) for capacity in self.dropped]
        if not self.banks:
            return {"dropped": dropped} if dropped else {}
        return {
            "slots": [bank.slots for bank in self.banks],
            "slot_bytes": [bank.slot for bank in self.banks],
            "shared_bytes": [bank.shared for bank in self.banks],
            "buffer_bytes": [bank.buffers for bank in self.banks],
            "predicted_pool_bytes": self.pools,
            "measured_pool_bytes": measured,
            "predicted_to_measured": self.pools / measured if measured else None,
            "dropped": dropped,
        }


def plan_memory(
    chunks: Sequence[GraphedModule],
    arguments: Arguments,
    slots: Sequence[int],
    capacities: Sequence[Capacity],
    budget: int | None = None,
    agree: Agree = lambda mine: mine,
    consensus: Consensus = alone,
) -> MemoryPlan:
    """Predict the graphs of `capacities` in `slots` slots of each chunk, and tell the chunks what
    is dropped.

    arguments: of a call of chunk number ... for a capacity. budget: bytes for pools and slot
    buffers of all chunks, None = no limit. consensus: whether a trace went well on all ranks that
    exchange data in it. Changes no training state. Collective where `agree` is, or the chunks are.
    """
    kept, dropped, notes = sorted(set(capacities)), list[Capacity](), list[str]()
    banks: tuple[BankMemory, ...] = ()
    while kept:
        largest = in_short(kept[-1])
        banks, failed, no_room = _predicted(chunks, arguments, slots, kept[-1], consensus)
        needed, why = sum(bank.total for bank in banks), "it is too large on another rank"
        if failed is not None:
            notes.append(f"memory of graphs of {largest} is not predicted: {failed}")
        if no_room:
            why = "there is no room for its graphs"
        elif budget is not None and needed > budget:
            why = f"its graphs need {shown(needed)}"
        if budget is None or agree(not no_room and needed <= budget):
            break
        notes.append(
            f"capacity {largest} is dropped: {why}, graph.memory_budget is {shown(budget)}; its "
            f"microbatches run eagerly, counted as '{OVER_BUDGET}'"
        )
        dropped.append(kept.pop())
        banks = ()
    if dropped:
        for chunk in chunks:
            control(chunk).capacities = CapturedCapacities(
                kept, dict.fromkeys(dropped, OVER_BUDGET)
            )
    if banks:
        count = f"{len(kept)} capacit{'y' if len(kept) == 1 else 'ies'} up to {largest}"
        of_chunks = [
            f"{bank.slots} x {shown(bank.slot)} for slots"
            + (f" + {shown(bank.shared)} shared" if bank.shared else "")
            + f" + {bank.slots} x {shown(bank.buffers)} for inputs"
            for bank in banks
        ]
        notes.append(f"graphs of {count} will take {shown(needed)}: {'; '.join(of_chunks)}")
    return MemoryPlan(tuple(kept), tuple(dropped), banks, tuple(notes))


def _predicted(
    chunks: Sequence[GraphedModule],
    arguments: Arguments,
    slots: Sequence[int],
    capacity: Capacity,
    consensus: Consensus,
) -> tuple[tuple[BankMemory, ...], str | None, bool]:
    """The banks of `capacity` alone, one of each chunk; none where a trace failed on any rank that
    votes, but why, and whether for want of memory here. They ask each other after every chunk,
    since the next one's trace exchanges data, too."""
    banks = []
    for number, chunk in enumerate(chunks):
        what = f"the memory of graphs of {in_short(capacity)}"
        # Before the trace, in whose exchanges others would wait for a rank that cannot begin it.
        error = consensus(what, control(chunk).refused_with_others())
        try:
            if error is not None:
                raise error
            # Also want of memory for arguments, say: who does not come to agree is waited for.
            with explained():
                banks.append(trial_memory(chunk, [arguments(number, capacity)], slots[number]))
        except CaptureError as failed:
            error = failed
        if (error := consensus(what, error)) is not None:
            told, no_room = error.what, isinstance(error.__cause__, torch.OutOfMemoryError)
            error = None  # its traceback holds this frame, and what was to be captured
            for traced in chunks:
                control(traced).capturer.compiled.clear()  # tried out again, on all ranks
            free_memory(chunks[0].device)  # the next trial may need it, no allocator looks for it
            return (), told, no_room
    return tuple(banks), None, False


ROOT = Path("/")
UNLIMITED = 2**60  # control groups of version 1 write a number near 2**63 where there is no limit
SURE = 0.7  # of the estimate of a microbatch
LEFT = 1.5  # of a microbatch: what malloc keeps of freed activations counts as taken
# Of the memory that there is: predictions of activations are off by some percent, allocators round
# and pools fragment, libraries take some.
SHARE = 0.9
MASTERS = 4  # bytes of an element under bfloat16: a float32 copy

FLOAT = torch.float32.itemsize
SCALE_BYTES = 4
KERNELS_PER_LAYER = 75  # forward and backward, nothing fused
BYTES_PER_KERNEL = 10_000  # of device memory in an instantiated graph
COMPILED = 0.85  # of what a layer keeps that is not compiled
HELD = 12  # bytes of an element of a piece of the state


def available_memory(
    device: torch.device, local_processes: int = 1, root: Path = ROOT
) -> int | None:
    """Bytes that this process may still take on `device`; None where the system does not say.

    Args:
        device: A CUDA device, whose free memory counts, or the CPU.
        local_processes: Processes of the run on this host, which share the memory of the host.
        root: Where `proc` and `sys` are.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = _lines(root / "proc/meminfo")
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    found += _of_control_groups(root)
    return max(min(found), 0) // local_processes if found else None


def _of_control_groups(root: Path) -> Iterator[int]:
    """Yields what each limit leaves: of the process's own control group and of those around it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _limits(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )


def _limits(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    group = top / path.lstrip("/")
    inside = [group, *group.parents]
    # A container sees its own group as the top, and the host's path to it leads nowhere.
    for folder in inside[: inside.index(top) + 1]:
        most, taken = ("".join(_lines(folder / name)).strip() for name in (limit, usage))
        # Where there is no limit, the file is not there or says `max`.
        if most.isdecimal() and taken.isdecimal() and int(most) < UNLIMITED:
            counts = dict(line.split() for line in _lines(folder / "memory.stat"))
            cached = (counts.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield int(most) - int(taken) + sum(map(int, cached))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or one that does not show it
        return []


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes on one rank. microbatch: eager, of `capacity`; graphs: of its pool
    beside that."""

    weights: int
    gradients: int
    optimizer: int
    microbatch: int
    graphs: int
    capacity: Capacity

    @property
    def state(self) -> int:
        """Bytes that do not depend on the microbatch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def least(self) -> int:
        """Bytes that the run takes in any case."""
        return self.state + round(SURE * (self.microbatch + self.graphs))

    @property
    def total(self) -> int:
        """Bytes that the run is expected to take on a CPU."""
        return self.state + round(LEFT * self.microbatch) + self.graphs


def need_of(config: TrainConfig, device_type: str, world: int = 1, rank: int = 0) -> Need:
    """Predicts what the run of `config` takes on one rank. Allocates nothing.

    Of state on the host counts what stays on the device for sure: `optimizer.resident`, where that
    is a size.

    Args:
        config: A run whose capacities are known.
        device_type: `cpu` or `cuda`.
        world: Number of processes.
        rank: This one's.
    """
    layout, model = config.parallel.layout().resolved(world), config.model
    if config.hf.path is not None or config.lora.enabled:
        return _need_of_frozen(config, device_type, world)
    dense, experts, layers = _elements(config, layout, rank)
    is_last = layout.coordinates(rank)["pp"] == layout.pp - 1
    replicas = layout.replicas(world) * layout.cp
    # Every rank updates its own part of what its replicas hold, too; of experts there are fewer
    # copies.
    updated = dense / replicas + experts / (replicas // layout.ep)
    plain = _sharded(config, layout, rank)
    matrices = [_padded(each, layout, replicas) for each in plain] if replicas > 1 else plain
    padding = round(sum(map(sum, matrices)) - sum(map(sum, plain)))
    updated += _kept(matrices, layout, replicas) - _kept(plain, layout, replicas)
    capacity = _sure_capacity(config)
    kept = partial(
        DecoderMemory,
        model,
        itemsize=ITEMSIZE[config.run.dtype],
        parts=layout.tp,
        rows=layout.cp,
        compiled=config.graph.compile,
        in_place=device_type == "cuda",
    )
    microbatch = kept(layers)(capacity) - (
        0 if is_last else kept(0)(capacity)
    )  # the head is the last stage's
    held, copies = dense + experts + padding, 2 if config.copies_weights else 1
    sharded = matrices if config.parallel.shards else []
    spared = _spared(sharded, layout) if replicas > 1 else 0.0
    # Sums over replicas are made in place, but those over blocks of what a rank keeps.
    shared_experts = layout.sharers(experts=True) > 1
    kept_again = [(d, e if shared_experts else 0.0) for d, e in sharded]
    blocks = replicas > 1 and layout.sharers() < replicas
    sums = _kept(kept_again, layout, replicas) if blocks else 0.0
    graph, gathers = config.graph, config.parallel.known_shard == "parameters"
    # A forward may keep less than its layers do one by one.
    less = graph.compile or bool(config.offload.modules) or config.run.recompute != NONE
    # Beside an eager microbatch, whose memory CUDA's allocator frees before.
    has_pool = (
        device_type == "cpu"
        and graph.enabled
        and graph.memory_budget is None
        and graph.scope is None
        and not less
    )
    hidden = sum(of_layer for of_layer, _ in _of_layers(config, layout, rank))
    state = _state_bytes(config, dense + experts, updated, hidden)
    return Need(
        round(ITEMSIZE[config.run.dtype] * (held * copies - (spared if gathers else 0))),
        round(ITEMSIZE[config.gradient_dtype(world)] * (held - spared + sums)),
        _on_device(config, device_type, state, updated),
        0 if less else microbatch,
        microbatch if has_pool else 0,
        capacity,
    )


def _need_of_frozen(config: TrainConfig, device_type: str, world: int) -> Need:
    """The same of a model of transformers, or of one with adapters: weights, and what trains all
    of them; adapters and microbatches are not counted. What is sharded of a model of transformers
    is estimated by its sizes, as if it had no experts."""
    path, parallel, spared = config.hf.path, config.parallel, 0
    layout = parallel.layout().resolved(world)
    whole = stage_weights(config.model, 0, 1)[0] if path is None else live_shape(path).elements
    if path is not None and layout.ep > 1:
        experts = live_shape(path).experts
        whole -= experts - experts // layout.ep
    whole //= layout.pp * layout.tp  # at least: norms are not split, nor experts over tp
    trained = 0 if config.lora.enabled else whole
    if parallel.shards and world > 1:
        spared = round(_spared(_sharded(config, layout, 0), layout))
    held = whole - (spared if parallel.known_shard == "parameters" else 0)
    updated = trained / (layout.replicas(world) * layout.cp)
    state = _state_bytes(config, trained, updated)
    return Need(
        held * (2 if config.copies_weights else 1) * ITEMSIZE[config.run.dtype],
        (trained - (spared if trained else 0)) * ITEMSIZE[config.gradient_dtype(world)],
        _on_device(config, device_type, state, updated),
        0,
        0,
        _sure_capacity(config),
    )


def _on_device(config: TrainConfig, device_type: str, state: int, updated: float) -> int:
    """Bytes on the device of so many of the optimizer's state for `updated` elements."""
    if not config.optimizer.offload or device_type != "cuda":
        return state
    stays = min(state, config.optimizer.resident_bytes() or 0)
    return stays + (BUFFERS * HELD * min(PIECE, round(updated)) if stays < state else 0)


def _state_bytes(config: TrainConfig, held: int, updated: float, hidden: float = 0.0) -> int:
    """Bytes of what the optimizer keeps of a rank's parameters, masters among it.

    held: elements of this rank's parameters. updated: those of them that it updates. hidden: those
    of matrices of layers, experts apart.
    """
    masters = MASTERS if config.run.dtype != "float32" else 0
    name = config.optimizer.name
    if name == "adafactor":
        # A mean and a sum a row and a column, on every rank; few matrices are much narrower than
        # the model.
        return round(updated * masters + held * 2 * 2 * FLOAT / config.model.hidden_size)
    if name == "adamw8bit":  # also of vectors, which are few
        return round(updated * (masters + adamw8bit.BYTES))
    momenta = hidden if name == "muon" else 0.0
    return round(updated * (masters + adamw.BYTES) - momenta * (adamw.BYTES - muon.BYTES))


def check_memory(
    config: TrainConfig,
    device: torch.device,
    available: int | None,
    *,
    world: int = 1,
    rank: int = 0,
) -> None:
    """Refuse a run that cannot fit.

    Args:
        config: A run whose capacities are known.
        device: What it runs on.
        available: Bytes that this process may still take there; None = nobody knows, and nothing is
            refused.
        world: Number of processes.
        rank: This one's.

    Raises:
        ConfigError: With what is needed, each part of it, what there is, and what can be changed.
    """
    need = need_of(config, device.type, world, rank)
    if available is None or need.least <= available:
        return
    on_cuda = device.type == "cuda"
    where = f"free on {device}" if on_cuda else "available to a process on this machine"
    parts = {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer state": need.optimizer,
        f"a microbatch of {in_short(need.capacity)}": SURE * need.microbatch,
        "its graphs": SURE * need.graphs,
    }
    told = [f"{name} {shown(size)}" for name, size in parts.items() if size]
    graphs = " or --graph.enabled false," if need.graphs else ""
    way_out = (
        "The model alone does not fit: choose a smaller one (another preset, --model.num-layers, "
        "--model.hidden-size), numbers of fewer bytes (--run.dtype and --optimizer.gradients "
        "bfloat16), spread it over more devices (torchrun: replicas share what they hold with "
        "--parallel.shard auto, and --parallel.tp and --parallel.pp cut a model), or take a "
        "machine with more memory"
        if need.state > available
        else f"The model fits, the microbatch does not: choose smaller --graph.capacities,{graphs} "
        "a smaller model, or a machine with more memory"
    )
    raise one_problem(
        f"memory: this run needs at least {shown(need.least)}, and {shown(available)} are {where}: "
        f"{', '.join(told)}. {way_out}"
    )


def _elements(config: TrainConfig, layout: Layout, rank: int) -> tuple[int, int, int]:
    """Elements of this rank's parameters, of its experts, and its layers."""
    chunks, place, experts = config.parallel.chunks, layout.coordinates(rank), config.model.experts
    mine = range(-(-experts.count // layout.ep)) if experts.enabled and layout.ep > 1 else None
    of = layout.pp * chunks
    found = [
        stage_weights(config.model, chunk * layout.pp + place["pp"], of, stage_tokens(config), mine)
        for chunk in range(chunks)
    ]
    dense, owned, layers = (sum(numbers) for numbers in zip(*found, strict=True))
    return dense // layout.tp, owned, layers


def _sharded(config: TrainConfig, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """The same of all that may be sharded: embedding and head, where one stage alone reads them."""
    model, place = config.model, layout.coordinates(rank)["pp"]
    end = [(model.vocab_size * model.hidden_size / layout.tp, 0.0)]
    alone = end_units(model) > 0
    first = end if alone and place == 0 else []
    last = end if alone and place == layout.pp - 1 else []
    return [*first, *_of_layers(config, layout, rank), *last]


def _of_layers(config: TrainConfig, layout: Layout, rank: int) -> list[tuple[float, float]]:
    """Elements of the matrices of each of this rank's layers, those of experts apart, as if no
    replica shared them."""
    chunks, place = config.parallel.chunks, layout.coordinates(rank)
    matrices = layer_matrices(config.model)
    cut = stage_layers(config.model, chunks * layout.pp, stage_tokens(config))
    return [
        (matrices[index][0] / layout.tp, matrices[index][1] / layout.ep)
        for chunk in range(chunks)
        for index in cut[chunk * layout.pp + place["pp"]]
    ]


def _padded(matrices: tuple[float, float], layout: Layout, replicas: int) -> tuple[float, float]:
    """The same of one layer with the padding of flat buffers, which divide by the number of
    replicas. (Single matrices are padded only where they are tiny.)"""
    whole, experts = matrices if layout.ep > 1 else (sum(matrices), 0.0)
    multiple = ALIGNMENT * replicas
    return -(-whole // multiple) * multiple, -(-experts // multiple) * multiple


def _kept(sharded: list[tuple[float, float]], layout: Layout, replicas: int) -> float:
    """Elements of sharded layers that one of so many replicas updates."""
    return sum(d / replicas + e / (replicas // layout.ep) for d, e in sharded)


def _spared(sharded: list[tuple[float, float]], layout: Layout) -> float:
    """Elements of sharded layers that a rank does not hold: it keeps its part, and has a buffer in
    which they take turns."""
    within, of_experts = layout.sharers(), layout.sharers(experts=True)
    shared = [(d, e if of_experts > 1 else 0.0) for d, e in sharded]
    parts = sum(d / within + e / of_experts for d, e in shared)
    _, turns = take_turns([round(sum(each)) for each in shared])
    return max(0.0, sum(map(sum, shared)) - parts - turns)


def _sure_capacity(config: TrainConfig) -> Capacity:
    """The largest capacity of which a microbatch or a capture comes for sure."""
    graph = config.graph
    if graph.enabled and graph.memory_budget is None:
        return graph.captured_capacities()[-1]
    return graph.packing_capacities()[0]


class ActivationBytes(NamedTuple):
    """Bytes of the fullest rank. moved: what of one row waits on the host. near: what all rows in
    flight keep on the device. working: what one layer computes again. head: of logits and loss."""

    moved: int
    near: int
    working: int
    head: int

    @property
    def device(self) -> int:
        """Bytes on the device at the peak."""
        return self.near + self.working + self.head


def activation_bytes(
    config: TrainConfig, capacity: Capacity, rows: int, offload: bool
) -> ActivationBytes:
    """Predicts what rows of a capacity keep on their way through the layers.

    Args:
        config: A run whose `run.recompute` is one of KINDS.
        capacity: Of a row; ranks of a context share its tokens.
        rows: Microbatches of a step on each rank.
        offload: Whether what is kept waits on the host, or with recomputation the inputs of layers.
    """
    model, layout = config.model, config.parallel.layout()
    recompute = config.run.recompute
    compiled = config.graph.compile and recompute == NONE
    memory = DecoderMemory(model, 0, ITEMSIZE[config.run.dtype], layout.tp, layout.cp, compiled)
    head = memory(capacity)
    layers = -(-model.depth // layout.pp)
    whole = replace(memory, layers=layers)(capacity) - head
    columns = {kind: kept_columns(model, kind) for kind in KINDS}
    # Offloading moves everything, or with recomputation the inputs of layers: results that are kept
    # selectively do not pass its hooks.
    kept, passing = (
        round(whole * columns[kind] / columns[NONE])
        for kind in (recompute, NONE if recompute == NONE else FULL)
    )
    moved = passing if offload else 0
    near = (kept - moved) * min(layout.pp, rows) + round(2 * moved / layers)
    working = 0 if recompute == NONE else round(whole / layers)
    return ActivationBytes(moved, near, working, head)


def predicted_peak(config: TrainConfig, device_type: str, world: int = 1, rank: int = 0) -> int:
    """Bytes that a rank takes at the peak. Allocates nothing.

    Recomputation of some stages counts as none, and so does `auto`, which takes what is left.
    Activations of a model of transformers are those of a decoder of its sizes.

    Args:
        config: A run whose capacities are known.
        device_type: `cpu` or `cuda`.
        world: Number of processes.
        rank: This one's.
    """
    need = need_of(config, device_type, world, rank)
    if device_type == "cpu":
        return need.total
    counted = config
    if config.run.recompute not in KINDS:
        counted = replace(config, run=replace(config.run, recompute=NONE))
    largest = max(config.graph.packing_capacities())
    offload = bool(config.offload.modules)
    return need.state + activation_bytes(counted, largest, config.parallel.pp, offload).device


def kept_columns(model: DecoderConfig, kind: str) -> float:
    """Numbers per token that all layers keep with a kind of recomputation."""
    hidden, layers = model.hidden_size, model.depth
    if kind == FULL:
        return layers * hidden
    found = float(layers * hidden if kind == SELECTIVE else 0)
    for name, branch in model.kinds().items():
        count = model.count(name)
        if kind == SELECTIVE:
            found += count * branch.product_columns(model)
        else:
            found += count * (3 * hidden + branch.saved_columns(model))
    return found


def resident_bytes(config: TrainConfig, memory: int | None, world: int = 1, rank: int = 0) -> int:
    """Bytes of the optimizer's state that may stay on the device.

    Args:
        config: A run whose capacities are known.
        memory: Bytes of a CUDA device that the run may take, None = there is no limit to keep to.
        world: Number of processes.
        rank: This one's.
    """
    if not config.optimizer.offload:
        return 0
    if (chosen := config.optimizer.resident_bytes()) is not None:
        return chosen
    if memory is None:
        return 0
    return max(0, round(SHARE * memory) - predicted_peak(config, "cuda", world, rank))


def resident_on(model: ModelChunks, config: TrainConfig, mesh: Mesh) -> int:
    """The same for a model that is on its device."""
    weights, memory = [local_tensor(parameter) for parameter in model.parameters()], None
    if weights and weights[0].is_cuda:
        held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in weights}
        memory = memory_of_run(weights[0].device, sum(held.values()))
    return resident_bytes(config, memory, mesh.world, mesh.rank)


def memory_of_run(device: torch.device, held: int) -> int:
    """Bytes of a CUDA device for a run that holds `held` of them by now: these, and what neither
    this process nor another one uses, within this process's limit."""
    free, total = torch.cuda.mem_get_info(device)
    limit = round(total * torch.cuda.get_per_process_memory_fraction(device))
    most = min(free + torch.cuda.memory_reserved(device), limit)
    return most - torch.cuda.memory_allocated(device) + held


def without_host_state(config: TrainConfig) -> TrainConfig:
    """The same run with all of the optimizer's state on the device."""
    return replace(config, optimizer=replace(config.optimizer, offload=False))


def planned_state(
    config: TrainConfig, whole: int, peak: int, memory: int | None
) -> tuple[int, int]:
    """Bytes of a planned run's optimizer state: on the device beside those in `peak`, and on the
    host.

    Args:
        config: The run.
        whole: Bytes of all of its state on a rank.
        peak: Bytes of the device without what stays by itself (`auto`).
        memory: Bytes of a device, None = not known.
    """
    options = config.optimizer
    if not options.offload:
        return 0, 0
    if (chosen := options.resident_bytes()) is not None:
        return 0, max(0, whole - chosen)
    stays = 0 if memory is None else min(whole, max(0, round(SHARE * memory) - peak))
    return stays, whole - stays


@dataclass(frozen=True)
class DecoderMemory:
    """Bytes of the pool that graphs of a decoder need, from its shape, until a run measures them.

    layers: in one chunk. itemsize: bytes of an activation. parts: ranks that share heads and
    columns (tp). rows: ranks that share rows (cp); in attention they share heads instead, which is
    as much. compiled: whether the layers are. in_place: whether the loss writes gradients over its
    logits, as on CUDA. A branch of a layer keeps for every token 3 vectors of the hidden size and
    those of its own, compiled layers `COMPILED` of that; the loss holds the gradient of the head
    twice, and one chunk of logits, with float32 copies unless it writes over them, which it does
    not with tp; a product in float8 has codes of its operands while it runs. Within 5
    % of compiled layers of Qwen3-0.6B and of the 8B shape on an H100, 12 % above uncompiled ones;
    not measured for latent attention, experts and Mamba-2.
    """

    model: DecoderConfig
    layers: int
    itemsize: int
    parts: int = 1
    rows: int = 1
    compiled: bool = False
    in_place: bool = True

    def __call__(self, capacity: Capacity) -> int:
        """Bytes for graphs of `capacity`."""
        model, tokens = self.model, capacity.tokens // self.rows
        # Averaged over layers: branches, and numbers that they save for the backward.
        branches = sum(len(model.branches(layer)) for layer in range(model.depth)) / model.depth
        counted = ((model.count(name), kind) for name, kind in model.kinds().items())
        columns = sum(count * kind.saved_columns(model) for count, kind in counted) / model.depth
        per_token = 3 * branches * model.hidden_size + columns / self.parts
        head = 4 * head_weights(model)
        kept = self.layers * per_token * self.itemsize * tokens * (COMPILED if self.compiled else 1)
        codes = _codes(model, tokens, self.parts) if self.layers else 0
        return round(kept + self._logits(tokens) + head / self.parts) + codes

    def _logits(self, tokens: int) -> float:
        """Bytes of a chunk of logits, and of what their gradients are made of."""
        words = self.model.vocab_size / self.parts
        in_place = self.in_place and self.parts == 1
        rows = min(tokens, rows_per_chunk(round(words), self.itemsize if in_place else None))
        return rows * words * (self.itemsize if in_place else 4 + 2 * self.itemsize + 2)


def _codes(model: DecoderConfig, tokens: int, parts: int) -> int:
    """Bytes of the largest product's operands in float8, and of what their rows are scaled by.
    parts: as in `DecoderMemory`."""
    if not is_float8(model.precision):
        return 0
    hidden = model.hidden_size
    width = max(model.intermediate_size // parts, hidden)
    if model.precision == MXFP8:  # scales in float32, and as the product reads them
        per_block = BLOCK + SCALE_BYTES + 1
        return (tokens * width + width * hidden) // BLOCK * per_block
    of_rows = tokens * (width + SCALE_BYTES) + width * (hidden + SCALE_BYTES)
    of_columns = (width + hidden) * (tokens + SCALE_BYTES)
    return max(of_rows, of_columns if model.precision == FLOAT8_GRADIENTS else 0)


def graph_bytes(layers: int) -> int:
    """Device memory of the graphs of one capacity beside the pool."""
    return layers * KERNELS_PER_LAYER * BYTES_PER_KERNEL
