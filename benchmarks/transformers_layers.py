"""transformers' own DeepSeek-V3 layers over the same values and gradients: what its users train
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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.bench.compiled import LayerStack, Marks, Rotary
from packgraph.models.hf_config import config_to_json
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.api import attention as packed_attention
from packgraph.ops.attention.metadata import AttentionMetadata

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
) -> LayerStack:
    """`model` through transformers' layers, each under torch.compile if a backend is given."""
    layers = their_layers(model)
    if backend is not None:
        for layer in layers:
            layer.compile(backend=backend)
    return LayerStack(model, layers)
