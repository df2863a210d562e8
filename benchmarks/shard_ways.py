"""The ways of training a step on several ranks: packgraph's trainer, and FSDP2 around the same
model.

    alone                     as none, by each rank for itself: the same work without exchanges
    none                      whole layers on every rank, the optimizer's state in parts
    gradients, parameters     `--parallel.shard`: every rank keeps its part of them
    fsdp                      torch's fully_shard on every layer: layers are gathered for the
                              forward and again for the backward, and reduced in every microbatch
    fsdp-keep                 the same, but layers stay gathered for a step (reshard_after_forward
                              off), and gradients are reduced with the last microbatch alone

Further words stand behind a plus: `layer` or `step`, graphs of layers or of whole steps with their
update instead of chunks; `compile`; `offload`, the optimizer's state in host memory, but for what
fits on the device, or `offload=60`, but for 60 % of it; `quiet`, the same work without gathers and
reductions, whose gradients are zeros. FSDP2 knows `compile`, every layer through torch.compile, and
`prefetch`: a layer's forward begins to gather the next one, beside what FSDP2 does by itself.

All train the same decoder with the same kernels, in the same arithmetic: weights, activations,
gradients and their sums in bfloat16, float32 masters and running means, the norm clipped, fused
AdamW. FSDP2 keeps the masters as its sharded parameters and casts what it gathers (its
MixedPrecisionPolicy), so it has no bfloat16 parts beside them.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from bench_models import dtype_on
from bench_ways import TorchLayer, layers_of, marks_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from packgraph.bench.rows import Row
from packgraph.graphs.stages import State
from packgraph.models.decoder import DecoderConfig, DecoderModel, ModelChunks
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel import data, sharded_layers
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.train.build import make_executor, make_optimizer
from packgraph.train.config.sections import (
    NONE,
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.memory import need_of, without_host_state

ALONE = "alone"
OURS = (ALONE, "none", "gradients", "parameters")
FSDP, KEEP = "fsdp", "fsdp-keep"
KINDS = (*OURS, FSDP, KEEP)
GRANULARITIES = ("layer", "step")  # beside chunk, which goes without saying
COMPILE, OFFLOAD, QUIET, PREFETCH = "compile", "offload", "quiet", "prefetch"
COLLECTIVES = "collectives"  # sharded layers are exchanged by them, not by copies of peers
WARMUP = 1  # eager steps
AHEAD = WARMUP + 1  # steps before anything is checked or timed, by every way
LEARNING_RATE = 1e-5
EXCHANGING = (data, sharded_layers)  # modules that gather parameters and reduce gradients


@dataclass(frozen=True)
class WayName:
    """What the name of a way says. resident: percent of the optimizer's state that stay on the
    device with `offload`, None = as many as fit."""

    kind: str
    granularity: str = "chunk"
    compile: bool = False
    offload: bool = False
    quiet: bool = False
    prefetch: bool = False
    collectives: bool = False
    resident: int | None = None

    @property
    def sums(self) -> bool:
        """Whether gradients are summed over all ranks."""
        return self.kind != ALONE and not self.quiet

    @staticmethod
    def alone(name: str) -> str:
        """The way called `name`, by each rank for itself."""
        return "+".join((ALONE, *name.split("+")[1:]))

    @staticmethod
    def read(name: str) -> "WayName":
        """Raises ValueError with what is wrong with it."""
        kind, *words = name.split("+")
        resident = None
        for number, word in enumerate(words):
            if found := re.fullmatch(f"{OFFLOAD}=([0-9]+)", word):
                words[number], resident = OFFLOAD, int(found[1])
        if kind not in KINDS:
            raise ValueError(f"{name}: {kind!r} is none of {', '.join(KINDS)}")
        ours = (*GRANULARITIES, COMPILE, OFFLOAD, QUIET, COLLECTIVES)
        known = ours if kind in OURS else (COMPILE, PREFETCH)
        if wrong := [word for word in words if word not in known]:
            raise ValueError(f"{name}: {kind} knows {', '.join(known)}, not {', '.join(wrong)}")
        cut = [word for word in words if word in GRANULARITIES]
        if len(set(words)) < len(words) or len(cut) > 1:
            raise ValueError(f"{name}: a word twice, or two granularities")
        if (resident or 0) > 100:
            raise ValueError(f"{name}: {resident} % of the state are more than there is")
        return WayName(
            kind,
            cut[0] if cut else "chunk",
            compile=COMPILE in words,
            offload=OFFLOAD in words,
            quiet=QUIET in words,
            prefetch=PREFETCH in words,
            collectives=COLLECTIVES in words,
            resident=resident,
        )


class RankStep(NamedTuple):
    """A step. batches: this rank's, on the host. loss_tokens: of all ranks. tokens: real ones, the
    mean of all ranks."""

    batches: Sequence[PackedBatch]
    loss_tokens: int
    tokens: float


class ShardWay(Protocol):
    """Trains steps. `prepare`, `step` and `close` are collective."""

    def prepare(self, steps: Sequence[RankStep]) -> None:
        """Run AHEAD steps, compile and capture."""

    def step(self, step: RankStep) -> tuple[Tensor, Tensor]:
        """The loss of this rank's tokens over those of the whole step, and the norm of the whole
        gradient before it is clipped."""

    def watch(self) -> None:
        """From here on steps are timed."""

    def facts(self) -> Row:
        """What it has cost to get ready."""

    def complaint(self) -> str | None:
        """Why the times are not those of this way, if something ran otherwise after all."""

    def close(self) -> None:
        """Free everything that was made. Before the process groups go."""


def make_way(
    name: str, config: DecoderConfig, capacity: Capacity, mesh: Mesh, device: torch.device
) -> ShardWay:
    """The way called `name`, with a model of its own. Raises ValueError where it cannot run."""
    said = WayName.read(name)
    if said.kind not in OURS:
        return FsdpWay(said, config, mesh, device)
    return TrainerWay(said, config, capacity, mesh, device)


class TrainerWay:
    """Steps as packgraph's trainer makes them."""

    def __init__(
        self,
        said: WayName,
        config: DecoderConfig,
        capacity: Capacity,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        whole = said.granularity == "step"
        run = TrainConfig(
            preset="bench",
            model=config,
            run=RunConfig(dtype=str(dtype_on(device)).removeprefix("torch.")),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(offload=said.offload),
            graph=GraphConfig(
                warmup=WARMUP,
                strict=True,
                granularity=said.granularity,  # type: ignore[arg-type]
                compile=said.compile,
                optimizer=whole,
                autotune=False,
                capacities=(capacity,),
            ),
            parallel=ParallelConfig(
                shard="none" if said.kind == ALONE else said.kind  # type: ignore[arg-type]
            ),
        )
        ours = single_process() if said.kind == ALONE else mesh
        if said.resident is not None:
            run = _with_resident(run, device, ours, said.resident)
        self._around = without_exchanges if said.quiet else contextlib.nullcontext
        made = DecoderModel(config, device=device, dtype=dtype_on(device))
        self.model = ModelChunks([made.train()])
        by_collectives = said.collectives or said.quiet
        with without_peers() if by_collectives else contextlib.nullcontext():
            self.optimizer = make_optimizer(self.model, run, ours)
        self.executor = make_executor(self.model, run, device, ours)
        self._eager: Counter[str] = Counter()

    def prepare(self, steps: Sequence[RankStep]) -> None:
        """As `ShardWay.prepare`."""
        for number in range(AHEAD):
            with self._around():
                self.executor.before_step(number)
            self.step(steps[number % len(steps)])

    def watch(self) -> None:
        """As `ShardWay.watch`."""
        self._eager = Counter(self.executor.totals()["fallbacks"])

    def step(self, step: RankStep) -> tuple[Tensor, Tensor]:
        """As `ShardWay.step`."""
        with self._around():
            return self.executor.train_step(
                step.batches, step.loss_tokens, self.optimizer, LEARNING_RATE
            )

    def facts(self) -> Row:
        """Seconds of capture, bytes of pools."""
        return {
            "capture_seconds": round(self.executor.totals()["capture_seconds"], 3),
            "pool_bytes": self.executor.pool_bytes(),
        }

    def complaint(self) -> str | None:
        """As `ShardWay.complaint`."""
        more = Counter(self.executor.totals()["fallbacks"]) - self._eager
        return f"microbatches or steps ran eagerly: {dict(more)}" if more else None

    def close(self) -> None:
        """As `ShardWay.close`."""
        self.executor.close()
        del self.executor, self.optimizer, self.model


def _with_resident(run: TrainConfig, device: torch.device, mesh: Mesh, percent: int) -> TrainConfig:
    """The run with that share of a rank's state on the device."""
    state = need_of(without_host_state(run), device.type, mesh.world, mesh.rank).optimizer
    size = -(-state * percent // 100 // 1024)  # whole KiB, rounded up
    kept = f"{size}KiB" if size else NONE
    return replace(run, optimizer=replace(run.optimizer, resident=kept))


@contextlib.contextmanager
def without_peers() -> Iterator[None]:
    """Layers that are sharded within the block are exchanged by collectives."""
    before, data.find_peers = data.find_peers, lambda group, device: None
    try:
        yield
    finally:
        data.find_peers = before


@contextlib.contextmanager
def without_exchanges() -> Iterator[None]:
    """Within the block, gathers of parameters leave them as they are, and reductions give zeros:
    the same work, finite, that waits for nobody but for the norm. For the whole process, so nothing
    else may run; what is captured within stays so."""

    def gather(out: Tensor, mine: Tensor, **_: Any) -> "_Done":
        return _Done()

    def reduce(out: Tensor, whole: Tensor, **_: Any) -> "_Done":
        out.zero_()
        return _Done()

    quiet: dict[str, Callable[..., Any]] = {
        "all_gather_flat": gather,
        "reduce_scatter_flat": reduce,
    }
    before = [(module, name, getattr(module, name)) for module in EXCHANGING for name in quiet]
    for module, name, _ in before:
        setattr(module, name, quiet[name])
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


class _Done:
    """What was exchanged at once."""

    def wait(self) -> None:
        return


class FsdpWay:
    """FSDP2 around the same decoder. Raises ValueError in a single process."""

    def __init__(
        self, said: WayName, config: DecoderConfig, mesh: Mesh, device: torch.device
    ) -> None:
        if mesh.devices is None:
            raise ValueError("FSDP2 shards over several ranks: start them with torchrun")
        self.keeps, self.device = said.kind == KEEP, device
        dtype, adamw = dtype_on(device), OptimizerConfig()
        model = DecoderModel(config, device=device, dtype=dtype).train().float()
        self.module = FsdpDecoder(model, compile=said.compile)
        narrow = None if dtype == torch.float32 else dtype
        policy = MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=narrow, cast_forward_inputs=False
        )
        for part in self.module.parts():
            fully_shard(
                part,
                mesh=mesh["dp"],
                # None is torch's choice: all but the root. The head's backward follows at once.
                reshard_after_forward=False if self.keeps or part is self.module.head else None,
                mp_policy=policy,
            )
            assert isinstance(part, FSDPModule)
            # Sums, not means: losses are shares of that of all ranks.
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        for layer, following in itertools.pairwise(self.module.layers):
            if said.prefetch and isinstance(layer, FSDPModule):
                layer.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]
        assert isinstance(self.module, FSDPModule)
        self._root: FSDPModule = self.module
        groups = [
            {"params": [p for p in self.module.parameters() if (p.ndim >= 2) == decays]}
            | {"weight_decay": adamw.weight_decay if decays else 0.0}
            for decays in (True, False)
        ]
        self._clip_norm = adamw.clip_norm or float("inf")
        self.optimizer = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, betas=adamw.betas, eps=adamw.eps, fused=True
        )
        self._compiled = 0

    def prepare(self, steps: Sequence[RankStep]) -> None:
        """As `ShardWay.prepare`."""
        for number in range(AHEAD):
            self.step(steps[number % len(steps)])

    def watch(self) -> None:
        """As `ShardWay.watch`."""
        self._compiled = 0

    def step(self, step: RankStep) -> tuple[Tensor, Tensor]:
        """As `ShardWay.step`."""
        before = counters["stats"]["unique_graphs"]
        counted = torch.full((), step.loss_tokens, dtype=torch.int64, device=self.device)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(step.batches):
            if self.keeps:
                is_last = number == len(step.batches) - 1
                self._root.set_requires_gradient_sync(is_last)
                self._root.set_reshard_after_backward(is_last)
            loss = self.module(batch.to(self.device), counted)
            total += loss.detach()
            loss.backward()
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._compiled += counters["stats"]["unique_graphs"] - before
        return total, norm

    def _clip(self) -> Tensor:
        parameters = list(self.module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm, foreach=True)
        return norm

    def facts(self) -> Row:
        """It captures nothing."""
        return {"capture_seconds": None, "pool_bytes": None}

    def complaint(self) -> str | None:
        """As `ShardWay.complaint`."""
        again = self._compiled
        return f"code was compiled {again} times while it was timed" if again else None

    def close(self) -> None:
        """As `ShardWay.close`."""
        del self.module, self._root, self.optimizer


class FsdpDecoder(nn.Module):
    """A decoder as modules that FSDP2 gathers: embedding, layers, and head with the last norm; a
    tied matrix is gathered by the root, for embedding and head."""

    def __init__(self, model: DecoderModel, *, compile: bool) -> None:
        super().__init__()
        self.embed, self.head = _Embed(model), _Head(model)
        self.layers = nn.ModuleList(_Layer(layer, compile=compile) for layer in layers_of(model))
        self._model = [model]  # no submodule: parameters belong to the parts alone
        self._tied = model.config.tie_embeddings

    def parts(self) -> list[nn.Module]:
        """What is gathered as a whole, the root last."""
        own = [] if self._tied else [self.embed, self.head]
        return [*self.layers, *own, self]

    def forward(self, batch: PackedBatch, tokens_in_step: Tensor) -> Tensor:
        """The loss, as DecoderModel's."""
        (model,) = self._model
        state = self.embed(model.begin(batch, tokens_in_step))
        hidden, marks = state["hidden"], marks_of(model, state)
        for layer in self.layers:
            hidden = layer(hidden, state["rotary"], state["attention"], marks)
        loss: Tensor = self.head(hidden, state)
        return loss


class _Embed(nn.Module):
    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        self.embed_tokens, self._model = model.embed_tokens, [model]

    def forward(self, state: State) -> State:
        return self._model[0].run_embed(state)


class _Head(nn.Module):
    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        self.norm, self._model = model.norm, [model]
        if model.config.tie_embeddings:
            self.embed_tokens = model.embed_tokens
        else:
            self.lm_head = model.lm_head

    def forward(self, hidden: Tensor, state: State) -> Tensor:
        (model,) = self._model
        return model.end(model.run_head({**state, "hidden": hidden}))


class _Layer(nn.Module):
    """A layer whose hooks stay outside of what is compiled."""

    def __init__(self, layer: TorchLayer, *, compile: bool) -> None:
        super().__init__()
        self.inner = layer
        if compile:
            layer.compile()

    def forward(self, *arguments: Any) -> Tensor:
        hidden: Tensor = self.inner(*arguments)
        return hidden
