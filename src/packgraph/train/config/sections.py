"""Options of a training run: one small frozen dataclass for each part.

Every field has a default in its preset, a type that `train/config/reading.py` reads from files and
options, and one line of help in the docstring of its class (`name: help`), which is what
`packgraph train --help all` prints. A section refuses values that are wrong in themselves; what is
wrong between sections is found by `train/validate.py`.
"""

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.models.config import DecoderConfig
from packgraph.offloading.plan import OffloadKnobs
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout, Shard, context_sizes
from packgraph.train.config.reading import path_problem, shown, true_of

DEFAULT_DOCUMENTS_CAP = 50
TRACKERS = ("tensorboard", "wandb", "mlflow")  # as `train/metrics.py` makes them
AUTO, NONE = "auto", "none"
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # bytes of a number, by run.dtype and the like


def _refuse(problems: dict[str, bool]) -> None:
    """Raise one ValueError with all texts whose condition is true."""
    if found := true_of(problems):
        raise ValueError("; ".join(found))


def _path_problems(what: str, paths: dict[str, str]) -> dict[str, bool]:
    """The problems of options, by name, that no file or folder can have as its path."""
    return {
        f"{name} {what}, got {shown(path)}: {problem}": True
        for name, path in paths.items()
        if (problem := path_problem(path))
    }


MOST_WORKERS = 1024  # processes of a rank


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, with linear warm-up, decay and clipping by the global gradient norm.

    name: adamw; muon = Muon for the matrices of hidden layers and AdamW for all else, at the same
        learning rate and weight decay; on ranks that hold whole matrices. adamw8bit = AdamW whose
        running means of matrices take a byte an element. adafactor = one running mean a row and a
        column of a matrix, no momentum; its learning rate is a share of the weights' size.
    muon_momentum: decay rate of Muon's running mean.
    learning_rate: peak learning rate; 1e-2 is usual for adafactor.
    weight_decay: decoupled weight decay, on parameters with two or more dimensions that are no
        bias.
    betas: decay rates of AdamW's two running means; adafactor has its own.
    eps: added to AdamW's denominator.
    warmup_steps: steps of linear warm-up.
    schedule: the learning rate after the warm-up: cosine and linear fall until decay_steps; wsd
        stays at the peak and falls linearly in the last decay_share of these steps; constant stays.
    decay_steps: step at which the decay ends; none = the last step of the run.
    decay_share: of the steps after the warm-up, those in which wsd falls.
    min_learning_rate_fraction: learning rate after the decay, as a fraction of the peak.
    clip_norm: largest global gradient norm; none = no clipping.
    gradients: dtype in which a rank adds up the gradients of a step's microbatches under bfloat16
        weights: float32, or bfloat16, which takes 2 bytes a parameter less and loses what is small
        beside the sum (of 1,000 equal gradients two thirds); auto = float32 unless every rank has
        one microbatch a step at most, and nothing to add.
    offload: keep AdamW's state in host memory, and bring it to the device piece by piece for each
        update; saves 12 bytes a parameter under bfloat16, which are copied each way instead.
    resident: how much of the state stays on the device all the same, with offload: none, a size as
        20GiB or 512MiB, or auto = what is left beside the peak that is predicted.
    """

    name: Literal["adamw", "muon", "adamw8bit", "adafactor"] = "adamw"
    muon_momentum: float = 0.95
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    warmup_steps: int = 10
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_steps: int | None = None
    decay_share: float = 0.2
    min_learning_rate_fraction: float = 0.1
    clip_norm: float | None = 1.0
    gradients: Literal["auto", "float32", "bfloat16"] = "auto"
    offload: bool = False
    resident: str = "auto"

    def __post_init__(self) -> None:
        _refuse(
            {
                f"learning_rate must be positive, got {self.learning_rate}": self.learning_rate
                <= 0,
                f"learning_rate must be a float32, got {self.learning_rate}": self.learning_rate
                > LARGEST_FLOAT,
                f"weight_decay must not be negative, got {self.weight_decay}": self.weight_decay
                < 0,
                f"betas must lie in [0, 1), got {self.betas}": not all(
                    0 <= beta < 1 for beta in self.betas
                ),
                f"eps must be positive, got {self.eps}": self.eps <= 0,
                f"muon_momentum must lie in [0, 1), got {self.muon_momentum}": not 0
                <= self.muon_momentum
                < 1,
                f"warmup_steps must not be negative, got {self.warmup_steps}": self.warmup_steps
                < 0,
                f"decay_steps must be positive, got {self.decay_steps}": (self.decay_steps or 1)
                < 1,
                f"decay_share must lie in (0, 1], got {self.decay_share}": not 0
                < self.decay_share
                <= 1,
                "min_learning_rate_fraction must lie in [0, 1], got "
                f"{self.min_learning_rate_fraction}": not 0 <= self.min_learning_rate_fraction <= 1,
                f"clip_norm must be positive, got {self.clip_norm}": self.clip_norm is not None
                and self.clip_norm <= 0,
            }
        )
        try:
            self.resident_bytes()
        except ValueError:
            told = f"resident must be auto, none or a size such as 20GiB, got {self.resident!r}"
            raise ValueError(told) from None

    def resident_bytes(self) -> int | None:
        """Bytes of state that stay on the device with `offload`; None = what is left there."""
        if self.resident in (AUTO, NONE):
            return None if self.resident == AUTO else 0
        return budget_bytes(self.resident, None)


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Options of graphs: the static shapes of microbatches, and the parts that are captured.

    enabled: capture and replay graphs; false trains eagerly.
    backend: cuda = CUDA graphs, recorder = the CPU backend, auto = what the device has.
    warmup: optimizer steps that run eagerly before the graphs are captured.
    slots: microbatches that may be in flight at once; none = as many as come. Training runs one
        after the other.
    strict: stop with an error where a graph cannot be captured, instead of going on eagerly.
    scope: names of the stages to capture, such as attn,mlp; none = all.
    granularity: layer = one graph for each layer, chunk = one for all layers, step = one for a
        whole step.
    compile: send what is captured through torch.compile first; calls that run eagerly run the same
        code.
    optimizer: with granularity step, the update of the weights is part of the graph too.
    capacities: static shapes of a microbatch, as TOKENSxDOCUMENTS[xLONGEST], separated by commas;
        auto = chosen from the lengths of the documents, see the section buckets.
    autotune: time the first steps after the capture both ways and let each bucket run eagerly where
        that is faster; auto = on CUDA only.
    memory_budget: memory that graphs may take on one device, as 12GiB, 512MiB or 40%; capacities
        that would need more are not captured, largest first, and run eagerly. none = no limit.
    max_documents: largest number of documents in a captured microbatch (50 when given without a
        value); packs with more run eagerly. none = the capacities alone decide.
    """

    enabled: bool = True
    backend: Literal["auto", "cuda", "recorder"] = "auto"
    warmup: int = 2
    slots: int | None = 1
    strict: bool = False
    scope: tuple[str, ...] | None = None
    granularity: Literal["layer", "chunk", "step"] = "layer"
    compile: bool = False
    optimizer: bool = False
    autotune: bool | Literal["auto"] = "auto"
    capacities: tuple[Capacity, ...] | Literal["auto"] = (Capacity(1024, 32),)
    memory_budget: str | None = None
    max_documents: int | None = field(default=None, metadata={"bare": str(DEFAULT_DOCUMENTS_CAP)})

    def __post_init__(self) -> None:
        _refuse(
            {
                f"warmup must be at least 1, got {self.warmup}": self.warmup < 1,
                "compile is of captured code, so it needs enabled = true": self.compile
                and not self.enabled,
                f"slots must be at least 1, got {self.slots}": self.slots is not None
                and self.slots < 1,
                "capacities must name at least one static shape, such as "
                "1024x32": not self.capacities,
                f"max_documents must be at least 1, got {self.max_documents}": self.max_documents
                is not None
                and self.max_documents < 1,
            }
        )
        if self.memory_budget is not None:
            budget_bytes(self.memory_budget, total=1)

    def is_autotuned(self, device_type: str) -> bool:
        """Tells whether graphs are timed against eager on this device type (`cpu` or `cuda`)."""
        return device_type == "cuda" if self.autotune == "auto" else self.autotune

    def captured_capacities(self) -> list[Capacity]:
        """The shapes graphs are captured for, smallest first: the capacities with the documents cap
        put in."""
        cap = self.max_documents
        return sorted(
            {
                replace(one, documents=min(one.documents, cap or one.documents))
                for one in self.declared_capacities()
            }
        )

    def packing_capacities(self) -> list[Capacity]:
        """The shapes packs may have, smallest first: the captured ones and, under a documents cap,
        the full ones."""
        return sorted({*self.captured_capacities(), *self.declared_capacities()})

    def declared_capacities(self) -> tuple[Capacity, ...]:
        """`capacities` once they are known. Raises RuntimeError while they are to be chosen."""
        if self.capacities == "auto":
            raise RuntimeError(
                "graph.capacities = auto: they are not chosen yet, which `train.launch.prepare` "
                "does"
            )
        return self.capacities


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Spread of a run over the processes that torchrun starts.

    dp: replicas that train on different packs; none = all processes that cp, tp and pp leave over.
    cp: ranks that every row of tokens is spread over; in attention they share the heads instead.
    cp_kind: how these share attention: ulysses = by heads, zigzag = by parts of documents, for
        which places are padded to multiples of twice the ranks; auto = ulysses where the ranks
        divide the heads.
    dynamic_cp: spread every row over as many ranks as its documents need, at most cp, in each
        microbatch anew; the documents of a step are shared out to all ranks of dp x cp together.
    min_cp: the fewest ranks that a row is spread over with dynamic_cp: cp, or a power of two that
        divides it. More means fewer shapes to capture, and smaller pieces of short rows.
    time_rows: once graphs are captured, time rows of every number of ranks, and plan by that
        instead of by estimates, with dynamic_cp; auto = on CUDA, unless the run is deterministic,
        since other times may make other plans.
    tp: ranks that every matrix is split over (tensor parallelism).
    pp: ranks that the layers are split over (pipeline parallelism).
    chunks: pieces of the model on each rank of the pipeline, which take turns: shorter bubbles,
        more transfers.
    sequence: under tp, norms and residuals work on a part of the rows instead of all; saves memory.
    shard: what of the layers' matrices each replica keeps a part of, instead of all: gradients; or
        parameters and gradients, which are then whole only while a layer runs; auto = the first of
        none, gradients and parameters that is predicted to fit. The optimizer's state is always in
        parts.
    shard_ranks: how many consecutive replicas (ranks of dp x cp) share a layer, such as those of a
        host, so that layers travel between them alone; what they keep is summed over the others
        once a step. 0 = all replicas.
    ep: replicas, of dp, that share the experts of every layer; each keeps a part of them, and
        tokens travel.
    dispatcher: how tokens get to experts: padded = a fixed number of rows per pair of ranks, which
        graphs can capture; symmetric = ranks read what is routed from each other's memory, on up to
        8 GPUs of one host, which graphs can capture, too; host_splits = exactly what is routed,
        whose sizes the host waits for; auto = local with ep = 1, else padded.
    expert_room: rows (per pair of ranks with padded, per rank with symmetric) over what equally
        busy experts would need; where it does not suffice the step is repeated with more.
    expert_stash: pages for what experts keep for the backward, over what equally busy experts would
        need, such as 1.1; only rows that hold tokens take memory then. 0 = all static rows are kept
        as they are.
    expert_stash_host: pages in pinned host memory, in the same measure, for what finds no page on
        the device; it counts towards the whole, so that 0.8 and 0.3 are pages for 1.1. Experts
        read and write these over the bus.
    expert_stash_page_rows: rows of a page, a multiple of 16: a layer's last page is half empty on
        average.
    expert_stash_resident: the last layer with experts keeps its rows as they are: its backward
        follows at once, so that copies to pages and back only take time; needs pp = 1.
    """

    dp: int | None = None
    cp: int = 1
    cp_kind: Literal["auto", "ulysses", "zigzag"] = "auto"
    dynamic_cp: bool = False
    min_cp: int = 1
    time_rows: bool | Literal["auto"] = "auto"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sequence: bool = True
    shard: Literal["auto", "none", "gradients", "parameters"] = "auto"
    shard_ranks: int = 0
    ep: int = 1
    dispatcher: Literal["auto", "local", "host_splits", "padded", "symmetric"] = "auto"
    expert_room: float = 1.5
    expert_stash: float = 0.0
    expert_stash_host: float = 0.0
    expert_stash_page_rows: int = 64
    expert_stash_resident: bool = False

    def __post_init__(self) -> None:
        sizes = {
            "dp": 1 if self.dp is None else self.dp,
            "cp": self.cp,
            "min_cp": self.min_cp,
            "tp": self.tp,
            "pp": self.pp,
            "chunks": self.chunks,
            "ep": self.ep,
            "expert_room": self.expert_room,
        }
        ranks, rows = self.shard_ranks, self.expert_stash_page_rows
        device, host = self.expert_stash, self.expert_stash_host
        text = f" (with expert_stash_host = {host} together at least 1)" if host > 0 else ""
        _refuse(
            {
                **{
                    f"{name} must be at least 1, got {size}": size < 1
                    for name, size in sizes.items()
                },
                f"dispatcher = local sends nothing, but ep = {self.ep} ranks share the experts; "
                "use padded or host_splits": self.dispatcher == "local" and self.ep > 1,
                f"shard_ranks must be 0, for all replicas, or at least 2, got {ranks}": ranks < 0
                or ranks == 1,
                f"shard_ranks = {ranks} is how many replicas share a layer, but shard = none "
                "shares none; give shard = parameters, or leave it out": ranks > 1
                and self.shard == "none",
                f"expert_stash must be 0 or at least 1, got {device}{text}": device < 0
                or 0 < device + max(host, 0) < 1,
                f"expert_stash_host must not be negative, got {host}": host < 0,
                "expert_stash_page_rows must be a positive multiple of 16, since rows are copied "
                f"16 at a time, got {rows}": rows < 1 or rows % 16 > 0,
                f"expert_stash_host = {host} is for what finds no page on the device; give "
                "expert_stash, too": host > 0 and device == 0,
                "expert_stash_resident is of a stash; give expert_stash, too": device == 0
                and self.expert_stash_resident,
                f"expert_stash_resident with pp = {self.pp}: forwards of other microbatches come "
                "between the last layer's forward and its backward; leave it out": self.pp > 1
                and self.expert_stash_resident,
            }
        )

    def layout(self) -> Layout:
        """The ranks along each axis."""
        return Layout(
            dp=self.dp,
            pp=self.pp,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            contexts=self.context_sizes if self.dynamic_cp else (),
            shard_ranks=self.shard_ranks,
        )

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that may share a row with dynamic_cp, ascending."""
        return context_sizes(self.cp, self.min_cp)

    @property
    def known_shard(self) -> Shard:
        """`shard`; none while `auto` is not decided, which `train.launch` does."""
        return "none" if self.shard == "auto" else self.shard

    @property
    def shards(self) -> bool:
        """True if layers are sharded over the replicas."""
        return self.known_shard != "none"

    @property
    def dispatcher_name(self) -> str:
        """The dispatcher, with `auto` decided."""
        if self.dispatcher != "auto":
            return self.dispatcher
        return "local" if self.ep == 1 else "padded"

    @property
    def splits_rows(self) -> bool:
        """True if each tensor parallel rank has a part of the rows of hidden states."""
        return self.sequence and self.tp > 1

    @property
    def row_parts(self) -> int:
        """Ranks that share the rows of hidden states."""
        return self.cp * (self.tp if self.splits_rows else 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of the run itself: its folder, its length and its device.

    name: folder of the run under `folder`; none = the model's name, made unique by a number.
    folder: folder that holds all runs.
    per_node_folder: the folder is not shared between nodes: each writes the shards of its ranks
        there, and checkpoints are gathered on the node of rank 0.
    steps: optimizer steps.
    tokens_per_step: real tokens of an optimizer step; packs are taken until they are reached, so
        their number varies.
    log_every: steps between two lines of a log that is no terminal.
    profile: steps that are traced once graphs are captured, into profile/rank-0.json in the run's
        folder, for Perfetto; 0 = none.
    checkpoint_every: steps between two checkpoints, and one at the end; 0 = none at all, so that
        nothing can go on.
    keep_checkpoints: newest checkpoints that are kept; the one of the lowest loss stays besides.
    async_checkpoints: steps go on while a checkpoint is written, from copies in host memory; if
        there is room for them.
    tracker: where rows are shown besides metrics.jsonl: tensorboard, wandb, mlflow; several are
        written as tensorboard,wandb.
    resume: go on from the newest checkpoint of the run; auto = if there is one, else start afresh:
        one command for first starts and restarts (torchrun --max-restarts, a requeued job); best =
        from the checkpoint of the lowest loss; what was trained after it is given up.
    max_minutes: minutes after which the run saves and ends with exit code 75, to be started again;
        none = no limit.
    timeout: seconds without a sign of life of a rank, or without an answer to a failed capture,
        after which all others end with exit code 69; a rank that is stopped for less goes on.
    on_spike: what happens to a step whose loss or gradient norm is far outside of those before:
        warn = say so and go on, stop = the run ends, skip = its update is left out, rollback = back
        to the newest checkpoint and on with other data. The last two do so, too, where loss or
        gradients are no numbers, which else ends the run.
    seed: seed of the weights and of dropout.
    init_from: folder with Hugging Face weights that the run starts from, in their shape; none =
        fresh ones.
    dtype: type of weights and activations; under bfloat16 the optimizer keeps float32 copies of the
        weights.
    device: auto = cuda where there is one, cpu otherwise.
    deterministic: only deterministic kernels; an operation that has none is an error.
    recompute: what the backward computes again instead of keeping it: none, selective = what is
        cheap for its bytes, such as norms and activations; full = each layer from its input; names
        of stages (attn,mlp) in full; auto = the least that fits graph.memory_budget, or else the
        free memory.
    """

    name: str | None = None
    folder: str = "runs"
    per_node_folder: bool = False
    steps: int = 100
    tokens_per_step: int = 4096
    log_every: int = 10
    profile: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    async_checkpoints: bool = True
    tracker: tuple[str, ...] = ("tensorboard",)
    resume: bool | Literal["auto", "best"] = False
    max_minutes: float | None = None
    timeout: float = 10.0
    on_spike: Literal["warn", "stop", "skip", "rollback"] = "warn"
    seed: int = 0
    init_from: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    deterministic: bool = False
    recompute: str = "none"

    def __post_init__(self) -> None:
        counts = ("steps", "tokens_per_step", "log_every", "keep_checkpoints")
        unknown, name = sorted(set(self.tracker) - set(TRACKERS)), self.name
        whole = f"{self.folder}/{name or ''}"
        _refuse(
            {
                **{
                    f"{count} must be at least 1, got {getattr(self, count)}": getattr(self, count)
                    < 1
                    for count in counts
                },
                f"max_minutes must be more than 0, got {self.max_minutes}": self.max_minutes
                is not None
                and self.max_minutes <= 0,
                f"timeout must be at least 5 seconds, got {self.timeout}": self.timeout < 5,
                f"checkpoint_every must not be negative, got {self.checkpoint_every}": (
                    self.checkpoint_every < 0
                ),
                f"profile must not be negative, got {self.profile}": self.profile < 0,
                "on_spike = rollback goes back to a checkpoint, and checkpoint_every = 0 writes "
                "none": (self.on_spike == "rollback" and self.checkpoint_every == 0),
                f"name must be the name of one folder, got {shown(name)}": name is not None
                and (name.strip() in ("", ".", "..") or "/" in name or "\\" in name),
                "folder must name the folder that is to hold all runs; . is the current one": (
                    not self.folder
                ),
                **_path_problems(
                    "cannot be the path of a folder",
                    {"folder and name": whole, "init_from": self.init_from or ""},
                ),
                f"tracker must be of {', '.join(TRACKERS)}, got {shown(', '.join(unknown))}": (
                    bool(unknown)
                ),
                f"device must be auto, cpu, cuda or cuda:N, got {shown(self.device)}": (
                    re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device) is None
                ),
            }
        )


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """Bounds on the choice of graph.capacities = auto.

    max_tokens: tokens of the largest capacity, and so of the longest document that is not cut or
        dropped.
    max_count: how many capacities at most.
    memory_gib: GiB of device memory that the graphs of all slots may take, by a prediction; none =
        no limit.
    documents: how many documents are read to know their lengths.
    """

    max_tokens: int = 8192
    max_count: int = 8
    memory_gib: float | None = None
    documents: int = 20_000

    def __post_init__(self) -> None:
        _refuse(
            {
                **{
                    f"{name} must be at least 1, got {getattr(self, name)}": getattr(self, name) < 1
                    for name in ("max_tokens", "max_count", "documents")
                },
                f"memory_gib must be positive, got {self.memory_gib}": self.memory_gib is not None
                and self.memory_gib <= 0,
            }
        )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Activations that wait in pinned host memory between forward and backward, to fit longer rows.
    Until there is a plan all that may move does, so the host needs room for what `modules` save.

    modules: activations that may move to the host; of attn_norm, qkv_linear, core_attn, attn_proj,
        mamba_norm, mamba_scan, mlp_norm, mlp_act, expert_fc1 and moe_act, and of layer_input, with
        which recomputation begins; none = nothing. With
        graph.compile any of them means all that a layer saves.
    budget: device memory that these activations may hold at a time, as 4GiB or 512MiB; of groups of
        all microbatches in flight together: what has to move for that with the least waiting moves.
        With one microbatch in flight they may hold more wherever all else was seen to take less
        than at its most. none = no such limit.
    lost: share of a microbatch's time that may be lost to waiting for copies, such as 0.01: what
        saves most memory within that moves, by what graphs take once they have run for two steps;
        that may be less than at first. none = the options below alone decide, else they say what
        may move.
    fraction: of the groups (one module of one layer each) that may move, those first in the forward
        move.
    min_bytes: tensors and groups smaller than that stay.
    margin: groups that stay because the backward needs them first; none = the last one of each
        module.
    delta_bytes_per_pp_rank: bytes more that stay on each later rank of a pipeline, which has less
        in flight.
    in_flight: copies to the host at one time; more hide more of the copying and hold more memory.
    delay_until_replay: copies of eager stages between graphs are queued after the next graph's
        launch.
    """

    modules: tuple[str, ...] = ()
    budget: str | None = None
    lost: float | None = None
    fraction: float = 1.0
    min_bytes: int = 2**20
    margin: int | None = None
    delta_bytes_per_pp_rank: int = 0
    in_flight: int = 2
    delay_until_replay: bool = True

    def __post_init__(self) -> None:
        self.knobs()
        self.budget_bytes()
        _refuse(
            {
                f"lost must be a share of the time, 0 to 1, got {self.lost}": not 0
                <= (self.lost or 0)
                < 1,
                "budget and lost are two ways to say how much moves: give one of them": self.lost
                is not None
                and self.budget is not None,
            }
        )

    def budget_bytes(self) -> int | None:
        """The budget in bytes. Raises ValueError when its text is none, or a share of a memory of
        unknown size."""
        return None if self.budget is None else budget_bytes(self.budget, None)

    def knobs(self) -> OffloadKnobs:
        """Options as plans take them. Raises ValueError with all reasons."""
        return OffloadKnobs(
            fraction=self.fraction,
            min_bytes=self.min_bytes,
            margin=self.margin,
            delta_bytes_per_pp_rank=self.delta_bytes_per_pp_rank,
            in_flight=self.in_flight,
        )


LARGEST_FLOAT = 3.4e38  # of float32, which the device has
NEEDS_PATH = ("jsonl", "text", "parquet", "shards", "hub")
# The source that the ending of a path says, where no other is named.
SOURCES: dict[str, Literal["jsonl", "parquet", "text"]] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Options of data: the source of documents, the tokenizer and how documents are packed.

    source: where documents come from; stdlib = the source code of Python's own library (no
        download), jsonl = one JSON object a line with text or chat messages, text = a folder of
        text files, parquet = tables with the same columns as jsonl, shards = a folder that
        `packgraph data build` has written, hub = a split of a dataset of the Hugging Face hub. The
        ending of a path names it, too (x.jsonl).
    path: file or folder of the source (not for stdlib); of hub ORG/NAME:SPLIT.
    mixture: several folders of shards instead of a path, as FOLDER=WEIGHT, separated by commas;
        each gives that share of the tokens, and repeats by itself.
    suffixes: endings of the files that count in a folder of text files.
    text_column: name of the column that holds the text in jsonl and parquet.
    tokenizer: bytes = one token a byte, or the path of a tokenizer.json.
    overlong: documents longer than every capacity: error = stop, split = cut into pieces, drop =
        leave out.
    on_bad: documents that cannot be read, or hold words that the tokenizer has not: stop = end the
        run at the first, skip = leave them out and count them.
    window: documents that wait to be combined into packs; more means less padding.
    seed: seed of the order of documents.
    epochs: passes over the documents; none = repeat until the run has all its steps.
    max_documents_loaded: only the first documents up to this number; none = all (stdlib: a sample
        of 6000).
    prefetch: steps whose packs are made ahead by a thread, while the device computes; 0 = none.
    workers: processes of each rank that read and tokenize documents ahead of their turn, for
        tokenizers that a core is too slow for; 0 = the thread that makes steps tokenizes too. Not
        for shards, which hold tokens.
    worker_timeout: seconds that a worker may take for 8 documents; the run ends then.
    """

    source: Literal["stdlib", "jsonl", "text", "parquet", "shards", "hub"] = "stdlib"
    path: str | None = None
    mixture: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst")
    text_column: str = "text"
    tokenizer: str = "bytes"
    overlong: Literal["error", "split", "drop"] = "error"
    on_bad: Literal["stop", "skip"] = "stop"
    window: int = 256
    seed: int = 0
    epochs: int | None = None
    max_documents_loaded: int | None = None
    prefetch: int = 2
    workers: int = 0
    worker_timeout: float = 300.0

    def __post_init__(self) -> None:
        least = {
            "window": self.window,
            "epochs": self.epochs,
            "max_documents_loaded": self.max_documents_loaded,
        }
        reads, seconds = self.source in NEEDS_PATH, self.worker_timeout
        _refuse(
            {
                **{
                    f"{name} must be at least 1, got {value}": value is not None and value < 1
                    for name, value in least.items()
                },
                f"seed must not be negative, got {self.seed}": self.seed < 0,
                f"prefetch must not be negative, got {self.prefetch}": self.prefetch < 0,
                f"worker_timeout must be at least 1 second, got {seconds}": not 1
                <= seconds
                < math.inf,
                f"workers must be 0 to {MOST_WORKERS:,}, got {self.workers}": not 0
                <= self.workers
                <= MOST_WORKERS,
                f"workers = {self.workers} tokenize, but source = shards holds tokens; leave it "
                "out": self.workers != 0 and self.source == "shards",
                **self._mixture_problems(),
                f"source = {self.source} needs a path, the file or folder to read": reads
                and not self.path
                and not self.mixture,
                f"path is set ({self.path}), but source = {self.source} reads none; set source to "
                f"one of {', '.join(NEEDS_PATH)}": not reads and bool(self.path),
                **_path_problems(
                    "cannot be the path of a file or folder",
                    {"path": self.path or "", "tokenizer": self.tokenizer},
                ),
            }
        )

    def weights(self) -> dict[str, float]:
        """Weight of each folder of the mixture. Raises ValueError for a text that has none."""
        found: dict[str, float] = {}
        for text in self.mixture:
            folder, _, weight = text.rpartition("=")
            try:
                number = float(weight)
            except ValueError:
                number = math.nan
            if not folder or not 0 < number < math.inf:
                raise ValueError(f"mixture: expected FOLDER=WEIGHT, such as web=0.7, got {text!r}")
            if folder in found:
                raise ValueError(f"mixture: {folder} is named twice")
            if problem := path_problem(folder):
                raise ValueError(f"mixture: {shown(folder)} cannot be a folder: {problem}")
            found[folder] = number
        return found

    def _mixture_problems(self) -> dict[str, bool]:
        if not self.mixture:
            return {}
        problems = {
            f"mixture is of folders of shards, but source = {self.source}": self.source != "shards",
            f"path ({self.path}) and mixture exclude each other": bool(self.path),
            "epochs is of one folder, and those of a mixture end at different times; use "
            "run.steps": self.epochs is not None,
            "max_documents_loaded is of one folder, not of a mixture": self.max_documents_loaded
            is not None,
        }
        try:
            self.weights()
        except ValueError as error:
            problems[str(error)] = True
        return problems


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluations between the steps of a run, on documents that it does not train on.

    every: steps between two evaluations; 0 = none.
    path: files or folders with documents to evaluate on, separated by commas, each with a loss of
        its own; folders of shards, .jsonl and .parquet are known, others are read as data.source
        says, or as text.
    share: share of the training documents that is held out, to be evaluated on and never trained
        on; the same ones whatever the seed, the order and the ranks.
    tokens: of each path, or of each part of a mixture, documents are taken until they have so many
        tokens; 0 = all.
    patience: evaluations in a row without a lower loss after which the run ends; 0 = it never does.
    """

    every: int = 0
    path: tuple[str, ...] = ()
    share: float = 0.0
    tokens: int = 0
    patience: int = 0

    def __post_init__(self) -> None:
        _refuse(
            {
                **{
                    f"{name} must not be negative, got {getattr(self, name)}": getattr(self, name)
                    < 0
                    for name in ("every", "tokens", "patience")
                },
                f"share must lie in [0, 1), got {self.share}": not 0 <= self.share < 1,
                "path and share are two ways to say what is evaluated on: give one of them": bool(
                    self.path and self.share
                ),
                f"every = {self.every} needs documents to evaluate on: give a path, or a share of "
                "the training documents": self.every > 0 and not self.path and not self.share,
                "path, tokens and patience are of evaluations, so they need every": self.every == 0
                and bool(self.path or self.tokens or self.patience),
                "path names one file or folder twice": len(set(self.path)) < len(self.path),
                **{
                    f"path cannot be that of a file or folder, got {shown(path)}: {problem}": True
                    for path in self.path
                    if (problem := path_problem(path))
                },
            }
        )


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """A model of transformers, trained as it is: `packgraph train hf:PATH`.

    path: folder with config.json and safetensors of a model of transformers, or its name on the
        Hugging Face hub (ORG/NAME, ORG/NAME@REVISION), which is trained by its own code; none = a
        model of packgraph.
    random: start from random values and read config.json alone; else weights must be there.
    """

    path: str | None = None
    random: bool = False

    def __post_init__(self) -> None:
        path = self.path or ""
        _refuse(
            {
                **_path_problems("cannot be the path of a folder", {"path": path}),
                "path must name a folder with a config.json; . is the current one": self.path == "",
                "random is of a model of transformers, so it needs a path": self.random
                and not path,
            }
        )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank, which are trained and stored instead of all weights (package peft).

    rank: of the adapters; 0 = there are none, and all weights are trained.
    alpha: adapters are scaled by alpha / rank; none = twice the rank.
    targets: last names of the linear layers that get adapters, such as q_proj,v_proj; none = all
        linear layers but the head.
    dora: train the length of each row of the weights apart from its direction (DoRA).
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    dora: bool = False

    def __post_init__(self) -> None:
        _refuse(
            {
                f"rank must not be negative, got {self.rank}": self.rank < 0,
                f"alpha must be positive, got {self.alpha}": self.alpha is not None
                and self.alpha <= 0,
                "targets must name at least one layer; none = all": self.targets == (),
                "alpha, targets and dora are of adapters, so they need a rank": self.rank == 0
                and (self.alpha is not None or self.targets is not None or self.dora),
            }
        )

    @property
    def enabled(self) -> bool:
        """True if adapters are trained instead of all weights."""
        return self.rank > 0


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss that is minimised: of tokens, or of pairs of answers (preferences).

    name: tokens = cross-entropy of the tokens; of pairs, rows with `chosen` and `rejected`: dpo =
        against the weights that the run starts from (arXiv:2305.18290), simpo = by means over an
        answer's tokens and a margin (arXiv:2405.14734), orpo = with the token loss of the chosen
        answer (arXiv:2403.07691).
    beta: factor on the rewards of dpo and simpo, weight of orpo's odds ratio; none = 0.1, of simpo
        2.
    margin: by which simpo wants the reward of the chosen answer to be larger; none = 1.
    """

    name: Literal["tokens", "dpo", "simpo", "orpo"] = "tokens"
    beta: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        _refuse(
            {
                f"beta must be positive, got {self.beta}": not 0
                < (1.0 if self.beta is None else self.beta)
                < LARGEST_FLOAT,
                f"margin must not be negative, got {self.margin}": not 0
                <= (self.margin or 0.0)
                < LARGEST_FLOAT,
                "beta is of losses of pairs: dpo, simpo, orpo": self.beta is not None
                and not self.is_of_pairs,
                f"margin is of simpo, not of {self.name}": self.margin is not None
                and self.name != "simpo",
            }
        )

    @property
    def is_of_pairs(self) -> bool:
        """True if rows are pairs of a chosen and a rejected answer."""
        return self.name != "tokens"

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the weights that the run starts from."""
        return self.name == "dpo"

    @property
    def strength(self) -> float:
        """`beta`, or the default of the loss."""
        default = 2.0 if self.name == "simpo" else 0.1
        return default if self.beta is None else self.beta


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run.

    preset: name of the preset that the other values started from.
    """

    preset: str
    model: DecoderConfig
    hf: HfConfig = field(default_factory=HfConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    buckets: BucketConfig = field(default_factory=BucketConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def replicas_in_step(self) -> bool:
        """True if all replicas run as many microbatches, of equal capacity at a time: they share
        layers, or the graph of a step holds its update."""
        return self.parallel.shards or self.graph.optimizer

    @property
    def copies_weights(self) -> bool:
        """True if a frozen copy of all weights is held beside them: the reference of a loss, which
        adapters have in their base."""
        return self.loss.has_reference and not self.lora.enabled

    def gradient_dtype(self, world: int) -> Literal["float32", "bfloat16"]:
        """The dtype in which each of `world` ranks adds up gradients of a step's microbatches."""
        if self.run.dtype == "float32" or self.optimizer.gradients == "float32":
            return "float32"
        most = self.parallel.layout().replicas(world)  # of tokens: each pack has one at least
        if self.parallel.dynamic_cp:  # steps are planned, and fill rows
            most *= max(capacity.tokens for capacity in self.graph.packing_capacities())
        narrow = self.optimizer.gradients == "bfloat16" or self.run.tokens_per_step <= most
        return "bfloat16" if narrow else "float32"


# Help for fields that their own class does not explain, because there it goes without saying.
FURTHER_HELP = {
    "vocab_size": "rows of the embedding; at least the token ids of the tokenizer",
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width of the feed-forward layers",
    "num_layers": "decoder layers",
    "num_heads": "query heads",
    "rope_theta": "base of the rotary embedding's wavelengths",
    "rms_norm_eps": "added to the mean square in RMSNorm",
}


def field_help(section: type, name: str) -> str:
    """The help of a field: what follows `name: ` in its class's docstring, up to the next field or
    an empty line."""
    text = section.__doc__ or ""
    if text.startswith(section.__name__ + "("):
        return FURTHER_HELP.get(
            name, ""
        )  # a signature that dataclass made up, for want of a docstring
    names = "|".join(field.name for field in fields(section))
    found = re.search(
        rf"(?<![\w.]){name}:\s(.*?)(?=(?<![\w.])(?:{names}):\s|\n\s*\n|\bRaises |\Z)",
        text,
        re.DOTALL,
    )
    help_ = FURTHER_HELP.get(name, "") if found is None else found[1]
    return " ".join(help_.split()).rstrip(".")
