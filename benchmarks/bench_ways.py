"""The ways of running forward and backward of one microbatch, all on the same values and the same
gradients.

What a way runs its documents in is part of it. Code that may meet any shape gets the documents as
they are; what was made for one shape gets them in that shape:

    eager, compile                       as many places for documents as there are documents, their
                                         own longest one
    reduce-overhead, graphed-callables,
    layer, chunk                         one capacity: the most tokens and documents that the packer
                                         makes
    whole-padded                         one capacity with 256 places for documents, as those who
                                         cannot know them take
    auto                                 the smallest of the buckets that the planner chose

Ways with +fp8 or +fp8_weight_gradients multiply in float8 (ops/float8) in all layers: those alone
are the middle of a model.
A checkout has further ones, for models with experts and of others: benchmarks/.

`compiled_stack` compiles a decoder by the library's own way of doing it
(graphs/compiled/compiler.py), `layer_stack` is a decoder whose layers are modules of their own:
what torch's tools for one module at a time are given. Embedding and head run as they are.

    state ─▶ embed ─▶ layer(hidden, rotary, attention, marks) ─▶ ... ─▶ head

`compiled_layers` compiles each layer with torch's own dynamic shapes: the number of documents and
the longest of them become symbols when they first change, so attention gets the documents as they
are and nothing is compiled again; the number of tokens stays a constant.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_models import TimedPart, twin
from torch import Tensor, nn
from torch._dynamo.utils import counters

from packgraph.graphs.compiled.compiler import Compiler
from packgraph.graphs.fallback import Stats
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.replay import ReplayHandle
from packgraph.graphs.stages import Stage, State, compile_units_of, run_stages
from packgraph.models.branches import head_sizes
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.ops.attention.varlen import varlen_problems
from packgraph.ops.float8.linear import (
    FLOAT8,
    FLOAT8_GRADIENTS,
    float8_problems,
    is_float8,
    multiply_by,
)
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, CapacitySet

Rotary = tuple[Tensor, ...]  # cosines and sines, or nothing where positions turn nothing


class OtherStack(nn.Module):
    """A decoder that computes what `model` does, with its parameters, in stages of another kind."""

    def __init__(self, model: DecoderStack, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.model, self._stages = model, stages

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def stages(self) -> Sequence[Stage]:
        return self._stages

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Does the same as `DecoderStack.forward`."""
        return run_stages(self, *args, **kwargs)


def compiled_stack(
    model: DecoderStack, backend: str | Callable[..., Any] = "inductor", mode: str | None = None
) -> OtherStack:
    """A decoder compiled for static shapes: embedding, layers and head each for itself (regional
    compilation), so that all layers share one piece of code. backend, mode: as for
    torch.compile."""

    class ByTorch(Compiler):
        def compiled(self, function: Callable[..., Any]) -> Any:
            return torch.compile(
                function, backend=backend, mode=mode, fullgraph=True, dynamic=False
            )

    compiler = (ByTorch if mode or backend != "inductor" else Compiler)("inductor", Stats())
    run = partial(compiler.run, compile_units_of(model.stages()))
    return OtherStack(model, [Stage("module", 0, run)])


@dataclass(frozen=True)
class Marks:
    """Tensors of a batch that layers with experts or Mamba-2 read, on their own: compiled code
    takes them as inputs.

    padding_mask: bool [T]. document_ids: int [T]. labels: int [T]. capacity: of the batch.
    documents: int [T], -1 in padding, for Mamba-2; None without.
    """

    padding_mask: Tensor
    document_ids: Tensor
    labels: Tensor
    capacity: Capacity
    documents: Tensor | None = None


LayerCall = Callable[[Tensor, Rotary, AttentionMetadata, Marks | None], Tensor]


class TorchLayer(nn.Module):
    """A decoder layer as one function. Its stages run methods of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        # By name: a stage knows the number of its layer, which compiled code would take for a
        # constant.
        self.methods = [stage.run.__name__ for stage in layer.stages()]  # type: ignore[operator]

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary,
        attention: AttentionMetadata,
        marks: Marks | None = None,
    ) -> Tensor:
        """hidden: [T, H]; rotary, attention: as in the decoder's state; marks: for experts. Returns
        [T, H]."""
        state: State = {
            "hidden": hidden,
            "rotary": rotary,
            "attention": attention,
            "batch": marks,
            "tokens_in_step": None,
            "documents": None if marks is None else marks.documents,
        }
        for method in self.methods:
            state = getattr(self.layer, method)(state)
        return state["hidden"]


def layer_stack(model: DecoderStack, layers: Sequence[LayerCall]) -> OtherStack:
    """A decoder through `layers` in place of its own, for steps of one microbatch.

    layers: for each layer a function (hidden, rotary, attention, marks) -> hidden.
    """

    def run(state: State) -> State:
        hidden, marks = state["hidden"], marks_of(model, state)
        for layer in layers:
            hidden = layer(hidden, state["rotary"], state["attention"], marks)
        return {**state, "hidden": hidden}

    first, *_, last = model.stages()
    return OtherStack(model, [first, Stage("layers", 0, run), *([last] if model.last else [])])


def marks_of(model: DecoderStack, state: State) -> Marks | None:
    """The marks of a state's batch, if the model has layers that read them."""
    if not (model.config.experts.enabled or model.config.mamba.enabled):
        return None
    batch: PackedBatch = state["batch"]
    documents = state.get("documents")
    return Marks(batch.padding_mask, batch.document_ids, batch.labels, batch.capacity, documents)


def layers_of(model: DecoderStack) -> list[TorchLayer]:
    """Lists every layer of `model` as a module of its own, over the same parameters."""
    return [TorchLayer(layer) for layer in model.layers.values()]


def compiled_layers(
    model: DecoderStack, backend: str | Callable[..., Any], dynamic: bool | None = None
) -> list[TorchLayer]:
    """`layers_of`, each under torch.compile. dynamic: None lets shapes become symbols when they
    change."""
    layers = layers_of(model)
    for layer in layers:
        layer.compile(backend=backend, dynamic=dynamic)
    return layers


OWN_ATTENTION = ("layer", "chunk", "auto", "partial", "host-splits", "transformers")
# of these ways is what the library chooses, not torch's
REMAINING_CALLS = 2


@dataclass(frozen=True)
class Setting:
    """Settings that all ways of one comparison share.

    work: to be done, by `model`. capacity: holds every microbatch. buckets: for the ways called
    auto, ascending. attention: own for what a way's own stack has (torch's kernel, for ours what
    the library chooses), or the backend of all. compiler: of ways that compile.
    """

    work: TimedPart
    model: DecoderStack
    capacity: Capacity
    buckets: tuple[Capacity, ...]
    attention: str = "own"
    compiler: str = "inductor"

    def attention_of(self, name: str) -> str:
        """The backend that the way called `name` asks its model for."""
        config, weight = self.model.config, next(self.model.parameters())
        if self.attention != "own":
            return self.attention
        torch_has_none = varlen_problems(weight.device, weight.dtype, *head_sizes(config))
        return "auto" if torch_has_none or name.partition("+")[0] in OWN_ATTENTION else "varlen"

    def model_of(self, name: str) -> DecoderStack:
        """A model of its own for the way called `name`, over the same values and gradients. Raises
        ValueError where its layers cannot multiply as the way does."""
        model = twin(self.model, self.attention_of(name))
        for precision in filter(is_float8, name.split("+")):
            weight, blocks = next(model.parameters()), moe_blocks([model])
            problems = float8_problems(weight.device, weight.dtype, bool(blocks))
            problems += multiply_by(model.layers, precision)
            for block in blocks:
                block.experts.by = precision
            if problems:
                raise ValueError(f"{name}: {'; '.join(problems)}")
        return model

    def needs_cuda(self, name: str) -> None:
        """Raises ValueError on a CPU."""
        if next(self.model.parameters()).device.type != "cuda":
            raise ValueError(f"{name} makes CUDA graphs: there is none on a CPU")


class Way:
    """One way of running microbatches; this one by calls of a module, eager or compiled.

    capacities: the only ones that it can run; none = it runs documents as they are. overwrites:
    whether a call may overwrite what the last returned.
    """

    def __init__(
        self,
        name: str,
        work: TimedPart,
        capacities: Sequence[Capacity] = (),
        overwrites: bool = False,
    ) -> None:
        self.name, self.work, self.capacities = name, work, tuple(capacities)
        self.overwrites, self.recompiled = overwrites, 0

    def capacity(self, batch: PackedBatch) -> Capacity:
        """The shape that this way runs the documents of `batch` in. Raises ValueError when it has
        none for them."""
        sizes = batch.num_documents, max(batch.lengths)
        if not self.capacities:
            return Capacity(batch.capacity.tokens, *sizes)
        return CapacitySet(self.capacities).smallest(batch.num_tokens, *sizes)

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        """Run the first microbatches: with most and with fewest documents, whatever is compiled
        sees what changes."""
        ordered = sorted(batches, key=lambda batch: (batch.num_documents, batch.num_tokens))
        for batch in (ordered[-1], ordered[0], *batches[:REMAINING_CALLS]):
            self.run(batch)

    def run(self, batch: PackedBatch) -> Tensor:
        """Forward and backward of a microbatch in this way's shape; the output, which the next call
        may overwrite."""
        if self.overwrites:
            torch.compiler.cudagraph_mark_step_begin()
        out = self.work.model(*self.work.arguments(batch))
        torch.autograd.backward(out, self.work.incoming(batch))
        return out.detach()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """A block of calls in which nothing about the model changes but values."""
        before = counters["stats"]["unique_graphs"]
        yield
        self.recompiled += counters["stats"]["unique_graphs"] - before

    def facts(self) -> dict[str, Any]:
        """Returns the costs of getting ready: seconds of capture, bytes of pools, pieces of
        compiled code, buckets."""
        shapes = [f"{shape.tokens}x{shape.documents}" for shape in self.capacities]
        known = ("capture_seconds", "capture_layer_seconds", "pool_bytes", "compiled")
        return {**dict.fromkeys(known), "shapes": shapes or "own"}

    def complaint(self) -> str | None:
        """Returns why the times are not those of this way, if microbatches ran otherwise."""
        times = f"{self.recompiled} times while it was timed"
        return f"code was compiled {times}" if self.recompiled else None

    def close(self) -> None:
        """Free everything that was made."""
        del self.work


class Graphed(Way):
    """Graphs of this library: a bank that is captured before it is needed, replayed as the trainer
    does it.

    scope: stages that are captured, None for all.
    """

    def __init__(
        self,
        name: str,
        work: TimedPart,
        capacities: Sequence[Capacity],
        granularity: str,
        compile: bool | str,
        scope: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, work, capacities)
        self.graphed = graph(
            work.model,
            capacities=self.capacities,
            granularity=granularity,
            warmup=0,
            slots=1,
            strict=True,
            scope=scope,
            compile=compile,
        )
        # As a pipeline does: gradients of hidden states stay in the slot.
        control(self.graphed).capturer.lends = work.hidden is not None
        self.used: dict[Capacity, PackedBatch] = {}
        self.by_autograd = 0

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        self.warm_up(batches)
        self.capture(batches)

    def warm_up(self, batches: Sequence[PackedBatch]) -> None:
        """Steps before any capture, one for each shape; what is to be compiled is compiled here."""
        self.used = {batch.capacity: batch for batch in batches}
        for batch in self.used.values():
            torch.autograd.backward(
                self.graphed.run_eagerly(*self.work.arguments(batch)), self.work.incoming(batch)
            )

    def capture(self, batches: Sequence[PackedBatch]) -> None:
        """Capture all shapes and run the first microbatches. After `warm_up`."""
        self.graphed.build([self.work.arguments(batch) for batch in self.used.values()])
        # From here on `complaint` says what ran eagerly, when all ranks are done.
        control(self.graphed).strict = False
        super().prepare(batches)

    def run(self, batch: PackedBatch) -> Tensor:
        arguments, incoming = self.work.arguments(batch), self.work.incoming(batch)
        if incoming is None:
            return self.graphed.forward_backward(*arguments)
        handle = self.graphed.acquire(arguments, {})
        if isinstance(handle, ReplayHandle) and handle.is_direct:
            out = handle.forward(arguments, {})
            handle.backward(incoming)
            return out
        self.by_autograd += 1
        if isinstance(handle, ReplayHandle):
            out = handle.run(arguments, {})
        else:
            out = self.graphed.fall_back(handle, arguments, {})
        torch.autograd.backward(out, incoming)
        return out.detach()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        with self.graphed.frozen():
            yield

    def facts(self) -> dict[str, Any]:
        stats = self.graphed.stats
        times = per_layer(stats.capture_seconds, self.work, len(self.used))
        return {
            **super().facts(),
            **times,
            "pool_bytes": stats.pool_bytes,
            "compiled": stats.compiled,
            "by_autograd": self.by_autograd,
        }

    def complaint(self) -> str | None:
        fallbacks = dict(self.graphed.stats.fallbacks)
        return f"microbatches ran eagerly: {fallbacks}" if fallbacks else None

    def close(self) -> None:
        self.graphed.close()
        super().close()


def per_layer(seconds: float, work: TimedPart, buckets: int) -> dict[str, Any]:
    """capture_seconds, and the same per layer and bucket."""
    return {
        "capture_seconds": round(seconds, 3),
        "capture_layer_seconds": round(seconds / work.config.num_layers / max(1, buckets), 5),
    }


def make_way(name: str, setting: Setting) -> Way:
    """The way called `name`. Raises ValueError where it cannot run."""
    kind, *further = name.split("+")
    if kind == "reduce-overhead":
        setting.needs_cuda(name)
    model = setting.model_of(name)
    if kind == "eager":
        return Way(name, setting.work.by(model))
    if kind == "compile":
        return Way(
            name, setting.work.by(layer_stack(model, compiled_layers(model, setting.compiler)))
        )
    if kind == "reduce-overhead":
        by = setting.work.by(compiled_stack(model, mode=kind))
        return Way(name, by, (setting.capacity,), overwrites=True)
    capacities = setting.buckets if kind == "auto" else (setting.capacity,)
    compile = setting.compiler if "compile" in further else False
    granularity = "layer" if kind == "layer" else "chunk"
    return Graphed(name, setting.work.by(model), capacities, granularity, compile)


Maker = Callable[[str, Setting], Way]
OURS = ("layer", "chunk", "layer+compile", "chunk+compile", "auto", "auto+compile")
WAYS = ("eager", "compile", "reduce-overhead", *OURS)
FLOAT8_WAYS = tuple(
    f"{kind}+{precision}"
    for precision in (FLOAT8, FLOAT8_GRADIENTS)
    for kind in ("chunk", "chunk+compile")
)
