"""Reasons why a model of transformers cannot be packed: everything that is known not to equal the
model itself, document by document."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from packgraph.integrations.transformers.experts import expert_problems
from packgraph.integrations.transformers.families import (
    FAMILIES,
    IMAGES,
    NOT_PACKED,
    TWO_ROWS,
    PackedFamily,
)
from packgraph.integrations.transformers.recurrent import is_theirs, mixer_problems, runner_of

# Tables of positions that depend on the longest document of a call.
MOVING_ROTARY = ("dynamic", "longrope")
# Modules of torch whose rows depend on each other.
CROSSING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
)
# Types of PEFT that a test has compared; DoRA and rsLoRA are of type LORA.
ADAPTERS = ("LORA", "IA3")


def causal_model(model: nn.Module) -> Any:
    """The PreTrainedModel with the head: the model itself, or the one that PEFT has wrapped.

    Raises TypeError where there is none.
    """
    found: Any = model
    if hasattr(found, "get_base_model"):  # of PEFT
        found = found.get_base_model()
    if not (hasattr(found, "get_output_embeddings") and hasattr(found, "base_model")):
        raise TypeError(
            f"packed takes a model of transformers with a language-model head, not "
            f"{type(model).__name__}"
        )
    return found


def family_of(model: nn.Module) -> PackedFamily:
    """The family of a model. Raises ValueError, with all reasons, where it cannot be packed."""
    causal = causal_model(model)
    kind = causal.config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise ValueError(f"{type(causal).__name__} cannot be packed: {_why_unknown(causal)}")
    check_outside(causal, family)
    problems = [*_same_places(getattr(causal.base_model, family.layers)), *_of_wrapper(model)]
    inner = {part for mixer in filter(runner_of, causal.modules()) for part in mixer.modules()}
    for module in causal.modules():
        if isinstance(module, CROSSING) and module not in inner:
            problems.append(f"{type(module).__name__} reads several rows, and so other documents")
        if hasattr(module, "is_concatenated"):
            problems += expert_problems(module)
        problems += mixer_problems(module)
    _refuse(causal, problems)
    return family


def check_outside(causal: Any, family: PackedFamily) -> None:
    """Raises ValueError, with all reasons, where what surrounds the layers cannot be packed."""
    _refuse(causal, [*_of_parts(causal, family), *_of_config(causal)])


def _refuse(causal: Any, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{type(causal).__name__} cannot be packed: {'; '.join(dict.fromkeys(problems))}"
        )


def _why_unknown(causal: Any) -> str:
    config = causal.config
    if config.model_type in NOT_PACKED:
        return NOT_PACKED[config.model_type].reason
    if getattr(config, "is_encoder_decoder", False):
        return TWO_ROWS
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return IMAGES
    return (
        f"the family {config.model_type!r} has not been compared with transformers; known are "
        f"{', '.join(FAMILIES)}"
    )


def _of_parts(causal: Any, family: PackedFamily) -> list[str]:
    decoder = causal.base_model
    if decoder is causal or causal.get_output_embeddings() is None:
        return ["it has no language-model head"]
    names = (
        family.embedding,
        family.layers,
        family.norm,
        family.positions,
        family.dropout,
        family.rotary,
    )
    missing = [name for name in names if name and not hasattr(decoder, name)]
    problems = [f"its decoder has no {', '.join(missing)}"] if missing else []
    layers, told = len(getattr(decoder, family.layers, ())), causal.config.num_hidden_layers
    if layers != told:  # some decoders run all, others as many as their config says
        problems.append(f"it has {layers} layers, and config.num_hidden_layers = {told}; set that")
    for name, module in (("the model", causal), ("its decoder", decoder)):
        if module._forward_hooks or module._forward_pre_hooks:
            problems.append(f"{name} has forward hooks, which would not run")
        if not is_theirs(module):
            problems.append(f"{name} has a forward of its own, which would not run")
    return problems


def _same_places(layers: Iterable[nn.Module]) -> list[str]:
    """Layers that transformers' caches take for one: the second would read the first one's keys."""
    found: dict[Any, int] = {}
    problems = []
    for number, layer in enumerate(layers):
        for place in {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}:
            if found.setdefault(place, number) != number:
                problems.append(
                    f"layers {found[place]} and {number} both have layer_idx {place}; set that of "
                    f"the modules in layer {number} to {number}"
                )
    return problems


def _of_config(causal: Any) -> list[str]:
    config, problems = causal.config, []
    rotary = getattr(config, "rope_parameters", None) or {}
    tables = [rotary, *(table for table in rotary.values() if isinstance(table, dict))]
    for kind in {table.get("rope_type") for table in tables} & set(MOVING_ROTARY):
        problems.append(
            f"rotary positions of type {kind!r} depend on the longest document of a call"
        )
    if getattr(config, "output_router_logits", False):
        problems.append(
            "its loss includes one that balances experts over a whole batch; set "
            "config.output_router_logits = False (in TRL router_aux_loss_coef=0.0 in SFTConfig, "
            "which sets it)"
        )
    if getattr(config, "z_loss_coefficient", 0):
        problems.append("its loss includes one of all logits; set config.z_loss_coefficient = 0")
    if getattr(causal.loss_function, "__name__", "") != "ForCausalLMLoss":
        problems.append("its loss_function is not the mean of next tokens, which takes its place")
    both = getattr(config, "use_bidirectional_attention", False)
    if both or not getattr(config, "is_causal", True):
        problems.append("its attention is not causal")
    if getattr(config, "add_cross_attention", False):
        problems.append("it attends to an encoder")
    return problems


def _of_wrapper(model: Any) -> list[str]:
    """PEFT's wrapper is not called: adapters must do all they do in the layers."""
    adapters = getattr(model, "peft_config", None)
    problems = []
    for name, adapter in adapters.items() if isinstance(adapters, dict) else ():
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        if getattr(adapter, "is_prompt_learning", False):
            problems.append(f"the adapter {name} adds tokens of its own")
        elif kind not in ADAPTERS:
            problems.append(
                f"the adapter {name} of type {kind} has not been compared; known are "
                f"{', '.join(ADAPTERS)}"
            )
        elif getattr(adapter, "alora_invocation_tokens", None):
            problems.append(f"the adapter {name} begins at tokens that its wrapper looks for")
    return problems


def takes_layer_type(rotary: nn.Module) -> bool:
    """Returns whether a module of rotary positions has a table for each type of layer."""
    return "layer_type" in inspect.signature(type(rotary).forward).parameters


def is_plain(head: nn.Module) -> bool:
    """Returns whether a head is one product with its weight and nothing else."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and not head._forward_hooks
        and not head._forward_pre_hooks
        and "forward" not in vars(head)
        and isinstance(head.weight, torch.Tensor)
    )
