"""A decoder under torch.compile, without graphs of ours: what eager users can have.

`CompiledStack` compiles embedding, layers and head each for itself (regional compilation), by the
library's own way of doing it (graphs/compiled/compiler.py): all layers share one piece of code per
shape.

`LayerStack` is a decoder whose layers are modules of their own: what torch's tools for one module
at a time are given. Embedding and head run as they are.

    state ─▶ embed ─▶ layer(hidden, rotary, attention, marks) ─▶ ... ─▶ head

`compiled_layers` compiles each layer with torch's own dynamic shapes: the number of documents and
the longest of them become symbols when they first change, so attention gets the documents as they
are and nothing is compiled again; the number of tokens stays a constant.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs.compiled.compiler import Compiler
from packgraph.graphs.fallback import Stats
from packgraph.graphs.stages import Stage, State, compile_units_of, run_stages
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.metadata import AttentionMetadata
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

Rotary = tuple[Tensor, ...]  # cosines and sines, or nothing where positions turn nothing


class AroundStack(nn.Module):
    """Computes what `model` does, with its parameters, in stages of another kind."""

    stages: Callable[[], Sequence[Stage]]

    def __init__(self, model: DecoderStack) -> None:
        super().__init__()
        self.model = model

    def begin(self, *args: Any, **kwargs: Any) -> State:
        return self.model.begin(*args, **kwargs)

    def end(self, state: State) -> Tensor:
        return self.model.end(state)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Does the same as `DecoderStack.forward`."""
        return run_stages(self, *args, **kwargs)


class CompiledStack(AroundStack):
    """A decoder compiled for static shapes. backend, mode: as for torch.compile."""

    def __init__(
        self,
        model: DecoderStack,
        backend: str | Callable[..., Any] = "inductor",
        mode: str | None = None,
    ) -> None:
        super().__init__(model)
        own = backend == "inductor" and mode is None
        make = (
            None
            if own
            else partial(torch.compile, backend=backend, mode=mode, fullgraph=True, dynamic=False)
        )
        self._compiler = Compiler("inductor", Stats(), make)
        self._pieces = compile_units_of(model.stages())

    def stages(self) -> Sequence[Stage]:
        return [Stage("module", 0, self._run)]

    def _run(self, state: State) -> State:
        return self._compiler.run(self._pieces, state)


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


class LayerStack(AroundStack):
    """A decoder through `layers` in place of its own.

    layers: for each layer a function (hidden, rotary, attention, marks) -> hidden. The step is one
    microbatch.
    """

    def __init__(self, model: DecoderStack, layers: Sequence[LayerCall]) -> None:
        super().__init__(model)
        self.inner = list(layers)

    def stages(self) -> Sequence[Stage]:
        own = self.model.stages()
        return [
            own[0],
            Stage("layers", 0, self.run_layers),
            *([own[-1]] if self.model.last else []),
        ]

    def run_layers(self, state: State) -> State:
        """All layers: reads hidden, rotary, attention and batch; replaces hidden."""
        hidden, marks = state["hidden"], marks_of(self.model, state)
        for layer in self.inner:
            hidden = layer(hidden, state["rotary"], state["attention"], marks)
        return {**state, "hidden": hidden}


def marks_of(model: DecoderStack, state: State) -> Marks | None:
    """The marks of a state's batch, if the model has layers that read them."""
    if not (model.config.experts.enabled or model.config.mamba.enabled):
        return None
    batch: PackedBatch = state["batch"]
    documents = state.get("documents")
    return Marks(batch.padding_mask, batch.document_ids, batch.labels, batch.capacity, documents)


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
