"""Implementations of attention, masks and experts for transformers, registered under own names.

    layer --packed_batch--> attention of the layer --> attend --> packgraph.ops.attention

A layer hands keyword arguments that it does not know on to the implementation of attention, so the
packed batch travels with the call, and nothing is stored anywhere. Calls without a packed batch,
such as those of `generate`, go to what the model had before; for `eager` that is a function of the
model's own file. Masks are never made for packed batches: their layers get None.
"""

import functools
import importlib
import sys
from typing import Any

from torch import Tensor, nn

from packgraph.integrations.transformers.experts import run_experts
from packgraph.integrations.transformers.recurrent import use_our_mixers
from packgraph.ops.attention.api import attention, attention_metadata, choose_backend
from packgraph.ops.attention.options import ScoreOptions
from packgraph.packing.batch import PackedBatch

PREFIX = "packgraph"
BATCH = "packed_batch"  # keyword argument of layers


def attend(
    otherwise: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_batch: PackedBatch | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """An implementation of attention for transformers. query, key, value: [1, heads, T, D]. Returns
    [1, T, heads, D] and no probabilities.

    otherwise: name of the implementation for calls without a packed batch, `sdpa` or `eager`.
    """
    if packed_batch is None:
        known = {
            "scaling": scaling,
            "dropout": dropout,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "s_aux": s_aux,
        }
        given = {name: value for name, value in known.items() if value is not None}
        found: tuple[Tensor, Tensor | None] = _other(otherwise, module)(
            module, query, key, value, attention_mask, **given, **others
        )
        return found
    options = ScoreOptions(sliding_window, softcap or 0.0, dropout, s_aux)
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    choice = choose_backend(q.device, q.dtype, q.shape[-1], v.shape[-1], options.needs)
    meta = attention_metadata(packed_batch, choice.name, finite_padding=True)
    return attention(q, k, v, meta, scale=scaling, options=options)[None], None


def _other(name: str, module: nn.Module) -> Any:
    """The implementation of attention of this name for a module."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    return importlib.import_module("transformers").AttentionInterface()[name]


def use_ours(model: Any) -> None:
    """Make `model`, a PreTrainedModel, call our attention, experts and mixers with a state."""
    use_our_mixers(model)
    transformers = importlib.import_module("transformers")
    now = model.config._attn_implementation
    if not now.startswith(PREFIX):
        otherwise = "sdpa" if now != "eager" and model._supports_sdpa else "eager"
        name = f"{PREFIX}_{otherwise}"
        masks = transformers.AttentionMaskInterface
        transformers.AttentionInterface.register(name, functools.partial(attend, otherwise))
        masks.register(name, masks()[otherwise])
        model.set_attn_implementation(name)
    if _experts_of(model):
        moe = importlib.import_module("transformers.integrations.moe")
        moe.ExpertsInterface.register(PREFIX, run_experts)
        model.set_experts_implementation(PREFIX)


def _experts_of(model: nn.Module) -> list[nn.Module]:
    """Modules whose forward goes through transformers' interface of experts."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]
