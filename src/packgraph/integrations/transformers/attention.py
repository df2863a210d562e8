"""Implementations of attention, masks and experts for transformers, registered under own names.

    layer --packed_batch--> attention of the layer --> attend --> packgraph.ops.attention

A layer hands keyword arguments that it does not know on to the implementation of attention, so the
packed batch travels with the call, and nothing is stored anywhere. Calls without a packed batch,
such as those of `generate`, go to what the config had before; for `eager` that is a function of the
model's own file. Masks are never made for packed batches: their layers get None.
"""

import functools
import importlib
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from packgraph.integrations.transformers.experts import run_experts
from packgraph.integrations.transformers.layer_call import LayerCall
from packgraph.integrations.transformers.recurrent import use_our_mixers
from packgraph.ops.attention.api import attention, attention_metadata, choose_backend
from packgraph.ops.attention.options import ScoreOptions

PREFIX = "packgraph"


def attend(
    otherwise: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_batch: LayerCall | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
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
            "softcap": softcap,
            "s_aux": s_aux,
        }
        given = {name: value for name, value in known.items() if value is not None}
        found: tuple[Tensor, Tensor | None] = _other(otherwise, module)(
            module, query, key, value, attention_mask, **given, **others
        )
        return found
    packed_batch.refuse_other_attention(module, key.shape[-2], attention_mask, others)
    options = ScoreOptions(others.get("sliding_window"), softcap or 0.0, dropout, s_aux)
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    choice = choose_backend(q.device, q.dtype, q.shape[-1], v.shape[-1], options.needs)
    meta = attention_metadata(packed_batch.batch, choice.name, finite_padding=True)
    packed_batch.ran.append(type(module).__name__)
    return attention(q, k, v, meta, scale=scaling, options=options)[None], None


def _other(name: str, module: nn.Module) -> Any:
    """The implementation of attention of this name for a module."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    return importlib.import_module("transformers").AttentionInterface()[name]


def use_ours(model: Any) -> None:
    """Make every layer of `model`, a PreTrainedModel, call our attention, experts and mixers with a
    state, also those whose config is not the model's."""
    use_our_mixers(model)
    transformers = importlib.import_module("transformers")
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in {id(found): found for found in configs}.values():
        now = getattr(config, "_attn_implementation", PREFIX) or "eager"
        if not now.startswith(PREFIX):
            otherwise = "sdpa" if now != "eager" and model._supports_sdpa else "eager"
            config._attn_implementation = f"{PREFIX}_{otherwise}"
    for otherwise in ("sdpa", "eager"):  # a model that was unpickled has the names alone
        name, masks = f"{PREFIX}_{otherwise}", transformers.AttentionMaskInterface
        transformers.AttentionInterface.register(name, functools.partial(attend, otherwise))
        masks.register(name, masks()[otherwise])
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ExpertsInterface.register(PREFIX, run_experts)
    for module in experts_of(model):
        module.config._experts_implementation = PREFIX


def experts_of(model: nn.Module) -> list[Any]:
    """Modules whose forward goes through transformers' interface of experts."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def refuse_other_experts(layers: Iterable[nn.Module]) -> None:
    """Raises ValueError where experts of `layers` would not run ours."""
    for module in (found for layer in layers for found in experts_of(layer)):
        if module.config._experts_implementation != PREFIX:
            raise ValueError(
                f"{type(module).__name__} would run as {module.config._experts_implementation!r}, "
                "not as packgraph's grouped products; call packed(model) again after "
                "set_experts_implementation, and after replacing a module or its config"
            )
