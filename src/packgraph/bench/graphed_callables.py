"""`torch.cuda.make_graphed_callables` for every layer of a decoder: graphs as torch itself offers
them.

What it needs is given: each layer as a function of tensors, boundaries of documents in a tensor of
fixed length, and the longest document as a constant. What it can share is shared: all layers read
rotary tables and boundaries from the same memory, filled once for each microbatch, so only hidden
states are copied from layer to layer. Embedding and head run as they are. The API's own limits
stay: inputs are copied in, gradients of parameters come back through autograd, and one microbatch
can be in flight.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.bench.torch_layers import LayerStack, Marks, Rotary, marks_of
from packgraph.graphs.stages import State
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.packing.batch import PackedBatch

Make = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], tuple[Any, ...]]


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
