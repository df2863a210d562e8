"""What a decoder is compared with: torch's own ways of running it.

`CompiledStack` has the same decoder with its stages under torch.compile, and no graphs of ours:
what eager users can have. Embedding, layers and head are compiled each for itself (regional
compilation), by the library's own way of doing it (graphs/compiled/compiler.py): all layers share
one piece of code per shape.

`WholeGraph` is one CUDA graph for forward and backward of a whole microbatch, padded to the largest
shape: the usual recipe.

    batch, hidden, gradient ── copy ──▶ static inputs ──▶ one replay ──▶ .grad, loss

Made by hand from `torch.cuda.graph`, as trainers do it: warm up on another stream, capture once,
copy inputs in. There is one shape, so rows are padded to the most tokens and the most documents,
and the longest document may fill the row.

`LayerStack` is a decoder whose layers are modules of their own: what torch's tools for one module
at a time are given.

    state ─▶ embed ─▶ layer(hidden, rotary, attention, marks) ─▶ ... ─▶ head          embed and head run as they are

`torch.compile` of each layer (regional compilation) with torch's own dynamic shapes: the number of
documents and the longest of them become symbols when they first change, so attention gets the
documents as they are and nothing is compiled again; the number of tokens stays a constant.

`GraphedCallables` are `torch.cuda.make_graphed_callables` for every layer: graphs as torch itself
offers them.

What it needs is given: each layer as a function of tensors, boundaries of documents in a tensor of
fixed length, and the longest document as a constant. What it can share is shared: all layers read
rotary tables and boundaries from the same memory, filled once for each microbatch, so only hidden
states are copied from layer to layer. Embedding and head run as they are. The API's own limits
stay: inputs are copied in, gradients of parameters come back through autograd, and one microbatch
can be in flight.
"""  # noqa: E501

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor, nn

from packgraph.bench.models import TimedPart
from packgraph.graphs.compiled.compiler import Compiler
from packgraph.graphs.fallback import Stats
from packgraph.graphs.stages import Stage, State, compile_units_of, run_stages
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

WARM_UP_CALLS = 3
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
Result = TypeVar("Result")
Rotary = tuple[Tensor, ...]  # cosines and sines, or nothing where positions turn nothing
Make = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], tuple[Any, ...]]


@contextlib.contextmanager
def no_silent_eager() -> Iterator[None]:
    """Within the block code that was recompiled too often raises RuntimeError, instead of running
    eagerly from then on.

    For warm-up calls: they see every shape, so what compiles there stays compiled.
    """
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


class CompiledStack(nn.Module):
    """Computes what `model` does, with its parameters, compiled for static shapes.

    backend, mode: as for torch.compile.
    """

    def __init__(
        self,
        model: DecoderStack,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        own = backend == "inductor" and mode is None
        make = (
            None
            if own
            else partial(torch.compile, backend=backend, mode=mode, fullgraph=True, dynamic=False)
        )
        self._compiler = Compiler("inductor", Stats(), make)
        self._pieces = compile_units_of(model.stages())

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def stages(self) -> Sequence[Stage]:
        return [Stage("module", 0, self._run)]

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As DecoderStack.forward."""
        return run_stages(self, *args, **kwargs)

    def _run(self, state: State) -> State:
        return self._compiler.run(self._pieces, state)


def record_on_cuda(run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
    """Capture `run` into a graph: (its result, how to replay it)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return out, graph.replay


class WholeGraph:
    """Forward and backward of one microbatch as one graph. Gradients must be there before it is
    made.

    sample: a microbatch of the only capacity. record: makes a function repeatable.
    """

    def __init__(
        self, work: TimedPart, sample: PackedBatch, record: Record = record_on_cuda
    ) -> None:
        self.work, self.capacity = work, sample.capacity
        self.data = sample.data.clone()
        self.batch = PackedBatch(self.data, sample.capacity)
        _, *rest = work.arguments(self.batch)
        self.rest = tuple(
            value.clone().detach().requires_grad_() if isinstance(value, Tensor) else value
            for value in rest
        )
        incoming = work.incoming(self.batch)
        self.incoming = None if incoming is None else incoming.clone()
        began = time.perf_counter()
        self.out, self.replay = record(self._pass)
        self.capture_seconds = time.perf_counter() - began

    def _pass(self) -> Tensor:
        for value in self.rest:
            if isinstance(value, Tensor):
                value.grad = None  # made anew by every pass, where a graph then writes it
        out = self.work.model(self.batch, *self.rest)
        torch.autograd.backward(out, self.incoming)
        return out.detach()

    def run(self, batch: PackedBatch) -> Tensor:
        """Forward and backward of `batch`; what comes out is overwritten by the next call.

        Raises ValueError for a microbatch of another capacity.
        """
        if batch.capacity != self.capacity:
            raise ValueError(
                f"this graph is of {self.capacity}, the microbatch is of {batch.capacity}"
            )
        self.data.copy_(batch.data)
        _, *rest = self.work.arguments(batch)
        with torch.no_grad():
            for static, now in zip(self.rest, rest, strict=True):
                if isinstance(static, Tensor):
                    static.copy_(now)
        incoming = self.work.incoming(batch)
        if self.incoming is not None and incoming is not None:
            self.incoming.copy_(incoming)
        self.replay()
        return self.out


@dataclass(frozen=True)
class Marks:
    """What layers with experts or Mamba-2 read of a batch, as tensors of their own: compiled code
    takes them as inputs.

    padding_mask: bool [T]. document_ids: int [T]. labels: int [T]. capacity: of the batch.
    documents: int [T], -1 in padding, for Mamba-2; None without.
    """

    padding_mask: Tensor
    document_ids: Tensor
    labels: Tensor
    capacity: Capacity
    documents: Tensor | None = None

    @staticmethod
    def of(state: State) -> "Marks":
        """Those of the batch in a decoder's state."""
        batch: PackedBatch = state["batch"]
        return Marks(
            batch.padding_mask,
            batch.document_ids,
            batch.labels,
            batch.capacity,
            state.get("documents"),
        )


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


class LayerStack(nn.Module):
    """Computes what `model` does, through `layers` in place of its own.

    layers: for each layer a function (hidden, rotary, attention, marks) -> hidden. The step is one
    microbatch.
    """

    def __init__(self, model: DecoderStack, layers: Sequence[LayerCall]) -> None:
        super().__init__()
        self.model, self.inner = model, list(layers)

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def stages(self) -> Sequence[Stage]:
        own = self.model.stages()
        return [
            own[0],
            Stage("layers", 0, self.run_layers),
            *([own[-1]] if self.model.last else []),
        ]

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As DecoderStack.forward."""
        return run_stages(self, *args, **kwargs)

    def run_layers(self, state: State) -> State:
        """All layers: reads hidden, rotary, attention and batch; replaces hidden."""
        hidden, marks = state["hidden"], marks_of(self.model, state)
        for layer in self.inner:
            hidden = layer(hidden, state["rotary"], state["attention"], marks)
        return {**state, "hidden": hidden}


def marks_of(model: DecoderStack, state: State) -> Marks | None:
    """The marks of a state's batch, if the model has layers that read them."""
    return Marks.of(state) if model.config.experts.enabled or model.config.mamba.enabled else None


def layers_of(model: DecoderStack) -> list[TorchLayer]:
    """Every layer of `model` as a module of its own, over the same parameters."""
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


class TensorLayer(nn.Module):
    """A layer as a function of tensors alone. tables: of rotary positions. constants, marks: what
    else a graph bakes."""

    def __init__(
        self, layer: nn.Module, tables: int, constants: AttentionMetadata, marks: Marks | None
    ) -> None:
        super().__init__()
        self.layer, self.tables = layer, tables
        self.masked = constants.mask is not None
        self.constants = constants.longest, constants.backend, constants.finite_padding
        self.capacity = None if marks is None else marks.capacity

    def forward(self, hidden: Tensor, *shared: Tensor) -> Tensor:
        """hidden: [T, H]; shared: as `shared_tensors` gives them. Returns [T, H]."""
        rotary, (cu_seqlens, padding, *rest) = shared[: self.tables], shared[self.tables :]
        mask, others = (rest[0], rest[1:]) if self.masked else (None, rest)
        metadata = AttentionMetadata(cu_seqlens, padding, mask, *self.constants)
        marks = None
        if self.capacity is not None:
            document_ids, labels, *documents = others
            marks = Marks(padding, document_ids, labels, self.capacity, *documents)
        return self.layer(hidden, rotary, metadata, marks)


def shared_tensors(
    rotary: Rotary, attention: AttentionMetadata, marks: Marks | None
) -> tuple[Tensor, ...]:
    """Everything that all layers read, as tensors: cos, sin, boundaries, padding, and mask and
    marks where they are."""
    mask = () if attention.mask is None else (attention.mask,)
    read = [] if marks is None else [marks.document_ids, marks.labels]
    if marks is not None and marks.documents is not None:
        read.append(marks.documents)
    return (*rotary, attention.cu_seqlens, attention.padding_mask, *mask, *read)


class GraphedCallables(LayerStack):
    """Computes what `model` does for microbatches of one capacity, its layers by graphs.

    layers: of the model, as modules. arguments: the model's, for any microbatch of that capacity.
    make: the API itself.
    """

    def __init__(
        self,
        model: DecoderStack,
        layers: Sequence[nn.Module],
        arguments: tuple[Any, ...],
        make: Make = torch.cuda.make_graphed_callables,
    ) -> None:
        state = model.stages()[0].run(model.begin(*arguments))
        constants: AttentionMetadata = state["attention"]
        marks = marks_of(model, state)
        self.shared = tuple(
            tensor.detach().clone() for tensor in shared_tensors(state["rotary"], constants, marks)
        )
        modules = tuple(
            TensorLayer(layer, len(state["rotary"]), constants, marks) for layer in layers
        )
        samples = tuple(
            (torch.randn_like(state["hidden"]).requires_grad_(), *self.shared) for _ in modules
        )
        super().__init__(model, [])
        self.capacity = arguments[0].capacity
        began = time.perf_counter()
        self.graphed = make(modules, samples)
        self.capture_seconds = time.perf_counter() - began

    def begin(self, batch: PackedBatch, *args: Any, **kwargs: Any) -> State:
        """As DecoderStack.begin. Raises ValueError for a microbatch of another capacity."""
        if batch.capacity != self.capacity:
            raise ValueError(
                f"these graphs are of {self.capacity}, the microbatch is of {batch.capacity}"
            )
        return super().begin(batch, *args, **kwargs)

    def run_layers(self, state: State) -> State:
        given = shared_tensors(state["rotary"], state["attention"], marks_of(self.model, state))
        for static, now in zip(self.shared, given, strict=True):
            static.copy_(now)
        hidden = state["hidden"]
        for layer in self.graphed:
            hidden = layer(hidden, *self.shared)
        return {**state, "hidden": hidden}
