"""Baselines of others for `bench step`: torch's graphs, graphs made by hand, transformers' layers.

    graphed-callables   torch.cuda.make_graphed_callables for every layer
    whole-padded        one graph of forward and backward, with places for 256 documents, as those
                        who cannot know their number take
    transformers        its own DeepSeek-V3 layers, eagerly

with `+compile`, each of compiled code.

`WholeGraph` is made by hand from `torch.cuda.graph`, as trainers do it: warm up on another stream,
capture once, copy inputs in. There is one shape, so rows are padded to the most tokens and the most
documents, and the longest document may fill the row.

    batch, hidden, gradient ── copy ──▶ static inputs ──▶ one replay ──▶ .grad, loss

`GraphedCallables` gives torch's API what it needs: each layer as a function of tensors, boundaries
of documents in a tensor of fixed length, and the longest document as a constant. What it can share
is shared: all layers read rotary tables and boundaries from the same memory, filled once for each
microbatch, so only hidden states are copied from layer to layer. Embedding and head run as they
are. The API's own limits stay: inputs are copied in, gradients of parameters come back through
autograd, and one microbatch can be in flight.

transformers' own DeepSeek-V3 layers over the same values and gradients: what its users train
with.

    state ─▶ our embed ─▶ DeepseekV3DecoderLayer(hidden [1, T, H], tables, kernel) ─▶ ... ─▶ our
    head

Parameters have the same names and shapes there, so its layers share ours, and their gradients.
Packed documents are kept apart by the attention kernel that our own model would take on this
device, registered there as an implementation of attention: its own choices are a mask of [T, T] or
the package flash-attn 2, whose cost would hide that of the layers. Experts run as grouped products
where the version has them, which is what it chooses for whole models. It knows no padding, so empty
places are routed like tokens, and no losses that balance experts.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from bench_models import TimedPart
from bench_ways import (
    Maker,
    Marks,
    OtherStack,
    Rotary,
    Setting,
    Way,
    compiled_layers,
    compiled_stack,
    layer_stack,
    layers_of,
    marks_of,
    per_layer,
)
from torch import Tensor, nn

from packgraph.graphs.stages import Stage, State
from packgraph.models.hf_config import config_to_json
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.api import attention as packed_attention
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

NAME = "packed_documents"
MODULE = "transformers.models.deepseek_v3.modeling_deepseek_v3"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    packed: AttentionMetadata,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """An implementation of attention for transformers. query, key, value: [1, heads, T, D]. Returns
    [1, T, heads, D].

    packed: the boundaries of the documents, which the layer passes on.
    """
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    return packed_attention(q, k, v, packed, scale=scaling)[None], None


class TheirLayer(nn.Module):
    """A layer of transformers called like one of ours."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotary,
        attention: AttentionMetadata,
        marks: Marks | None = None,
    ) -> Tensor:
        """hidden: [T, H]. Returns [T, H]."""
        cos, sin = rotary
        out = self.layer(
            hidden[None],
            attention_mask=None,
            position_embeddings=(cos[None], sin[None]),
            packed=attention,
        )
        return out[0]


def their_layers(model: DecoderStack) -> list[TheirLayer]:
    """The layers of `model` by transformers, over the same parameters and gradients, each made on
    the meta device.

    Raises ImportError without transformers, ValueError where it has no such model or its parameters
    have other names or shapes than ours.
    """
    if not model.config.latent.enabled:
        raise ValueError(
            "transformers' layers are there for latent attention with experts (DeepSeek-V3) only"
        )
    library, module = importlib.import_module("transformers"), importlib.import_module(MODULE)
    library.AttentionInterface.register(NAME, attend)
    described = config_to_json(model.config, next(model.parameters()).dtype)
    config = library.DeepseekV3Config(**described, attn_implementation=NAME)
    if hasattr(library.PreTrainedModel, "set_experts_implementation"):
        config._experts_implementation = "grouped_mm"
    layers = []
    for number, ours in model.layers.items():
        with torch.device("meta"):
            theirs = module.DeepseekV3DecoderLayer(config, int(number))
        _share(theirs, ours, f"layer {number}")
        layers.append(TheirLayer(theirs.train(ours.training)))
    return layers


def _share(theirs: nn.Module, ours: nn.Module, where: str) -> None:
    """Put our parameters and buffers in the place of theirs."""
    mine = dict(ours.named_parameters())
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    if wanted != {name: tuple(tensor.shape) for name, tensor in mine.items()}:
        raise ValueError(
            f"{where}: the parameters of this version of transformers are not those of ours: "
            f"{sorted(wanted.items() ^ {(name, tuple(t.shape)) for name, t in mine.items()})[:4]}"
        )
    for name, parameter in mine.items():
        _owner(theirs, name)._parameters[name.rpartition(".")[2]] = parameter
    buffers = dict(ours.named_buffers())
    for name, _ in list(theirs.named_buffers()):
        _owner(theirs, name)._buffers[name.rpartition(".")[2]] = buffers[name]


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def transformers_stack(
    model: DecoderStack, backend: str | Callable[..., Any] | None = None
) -> OtherStack:
    """`model` through transformers' layers, each under torch.compile if a backend is given."""
    layers = their_layers(model)
    if backend is not None:
        for layer in layers:
            layer.compile(backend=backend)
    return layer_stack(model, layers)


WARM_UP_CALLS = 3
PADDED_DOCUMENTS = 256
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
Result = TypeVar("Result")
Make = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], tuple[Any, ...]]


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


class GraphedCallables(OtherStack):
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
        first, *_, last = model.stages()
        state = first.run(model.begin(*arguments))
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
        layer_stage = Stage("layers", 0, self.run_layers)
        super().__init__(model, [first, layer_stage, *([last] if model.last else [])])
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


class Recorded(Way):
    """torch's own graphs: of each layer, or of everything at once. make: the call, given the first
    microbatch."""

    def __init__(
        self, name: str, work: TimedPart, capacity: Capacity, make: Callable[[PackedBatch], Any]
    ) -> None:
        super().__init__(name, work, (capacity,))
        self._make = make

    def prepare(self, batches: Sequence[PackedBatch]) -> None:
        self.made = self._make(batches[0])
        if isinstance(self.made, GraphedCallables):
            self.work = self.work.by(self.made)
        super().prepare(batches)

    def run(self, batch: PackedBatch) -> Tensor:
        return self.made.run(batch) if isinstance(self.made, WholeGraph) else super().run(batch)

    def facts(self) -> dict[str, Any]:
        return super().facts() | per_layer(self.made.capture_seconds, self.work, 1)


def _callables(name: str, setting: Setting) -> Way:
    setting.needs_cuda(name)
    model = setting.model_of(name)
    work, compiled = setting.work.by(model), name.endswith("+compile")
    layers = (
        compiled_layers(model, setting.compiler, dynamic=False) if compiled else layers_of(model)
    )
    return Recorded(
        name,
        work,
        setting.capacity,
        lambda batch: GraphedCallables(model, layers, work.arguments(batch)),
    )


def _whole(name: str, setting: Setting) -> Way:
    setting.needs_cuda(name)
    model = setting.model_of(name)
    work = setting.work.by(compiled_stack(model) if name.endswith("+compile") else model)
    documents = max(PADDED_DOCUMENTS, setting.capacity.documents)
    padded = Capacity(setting.capacity.tokens, documents)
    return Recorded(name, work, padded, lambda batch: WholeGraph(work, batch))


def _transformers(name: str, setting: Setting) -> Way:
    compiler = setting.compiler if name.endswith("+compile") else None
    stack = transformers_stack(setting.model_of(name), compiler)
    return Way(name, setting.work.by(stack))


OTHERS: dict[str, Maker] = {
    f"{name}{end}": make
    for name, make in (
        ("graphed-callables", _callables),
        ("whole-padded", _whole),
        ("transformers", _transformers),
    )
    for end in ("", "+compile")
}
