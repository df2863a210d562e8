"""Families of transformers that can be packed, and every reason why a model cannot be.

    tokens -- embedding -- * scale -- + positions -- dropout -- layers -- norm -- head -- / divisor
    -- softcap -- loss

Layers are called, never looked into: what they add to attention (windows, soft caps, sinks, layers
without rotary positions) they say to the implementation of attention that they call. So a family
is known by what surrounds its layers, and listed once a test has compared its loss and gradients.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from packgraph.integrations.transformers.experts import expert_problems
from packgraph.integrations.transformers.mixers import AROUND, is_theirs, mixer_problems, runner_of
from packgraph.torch_internals import has_module_hooks


@dataclass(frozen=True)
class PackedFamily:
    """One `model_type` of transformers. Names are those of attributes of its decoder, and of
    entries of its config.

    title: for people. kind: of its layers. token_mixers: modules of a layer that read other tokens
    (attention, mixers with a state). embedding, layers, norm: modules. positions: module of
    learned positions. dropout: module that follows. rotary: module of rotary positions. scale:
    entry that embeddings are multiplied by. divisor, factor: entries that logits are divided and
    multiplied by. softcap: entry of the soft cap on logits. differs: what transformers itself adds
    to the loss and `packed` does not, or anything else to be known.
    """

    title: str
    kind: Literal["dense", "experts", "hybrid"] = "dense"
    token_mixers: int = 1
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    positions: str = ""
    dropout: str = ""
    rotary: str = "rotary_emb"
    scale: str = ""
    divisor: str = ""
    factor: str = ""
    softcap: str = ""
    note: str = ""


_CAP = "final_logit_softcapping"
FAMILIES: Mapping[str, PackedFamily] = MappingProxyType(
    {
        "llama": PackedFamily("Llama"),
        "mistral": PackedFamily("Mistral", note="sliding window"),
        "qwen2": PackedFamily("Qwen2", note="sliding window in some layers"),
        "qwen3": PackedFamily("Qwen3"),
        "gemma": PackedFamily("Gemma"),
        "gemma2": PackedFamily("Gemma 2", softcap=_CAP, note="sliding window, soft caps"),
        "gemma3_text": PackedFamily("Gemma 3 (text)", softcap=_CAP, note="sliding window"),
        "phi3": PackedFamily("Phi-3", note="no `longrope`"),
        "olmo": PackedFamily("OLMo"),
        "olmo2": PackedFamily("OLMo 2"),
        "olmo3": PackedFamily("OLMo 3", note="sliding window"),
        "smollm3": PackedFamily("SmolLM3", note="layers without positions"),
        "granite": PackedFamily(
            "Granite", scale="embedding_multiplier", divisor="logits_scaling", note="scaled logits"
        ),
        "glm4": PackedFamily("GLM-4"),
        "gpt2": PackedFamily(
            "GPT-2",
            embedding="wte",
            layers="h",
            norm="ln_f",
            positions="wpe",
            dropout="drop",
            rotary="",
            note="learned positions, dropout",
        ),
        "qwen3_moe": PackedFamily("Qwen3-MoE", kind="experts"),
        "mixtral": PackedFamily("Mixtral", kind="experts"),
        "glm4_moe": PackedFamily("GLM-4.5-MoE", kind="experts"),
        "gpt_oss": PackedFamily("GPT-OSS", kind="experts", note="sinks, sliding window"),
        "deepseek_v3": PackedFamily("DeepSeek-V3", kind="experts", note="latent attention"),
        "bamba": PackedFamily(
            "Bamba", kind="hybrid", norm="final_layernorm", note="Mamba-2 or attention in a layer"
        ),
        "falcon_h1": PackedFamily(
            "Falcon-H1",
            kind="hybrid",
            token_mixers=2,
            norm="final_layernorm",
            scale="embedding_multiplier",
            factor="lm_head_multiplier",
            note="Mamba-2 and attention in every layer",
        ),
        "nemotron_h": PackedFamily(
            "Nemotron-H",
            kind="hybrid",
            embedding="embeddings",
            norm="norm_f",
            rotary="",
            note="Mamba-2, attention, experts; no positions",
        ),
        "qwen3_next": PackedFamily(
            "Qwen3-Next", kind="hybrid", note="gated delta rule, attention, experts"
        ),
    }
)


class NotPacked(NamedTuple):
    """A family that `packed` refuses. title: for people. reason: why."""

    title: str
    reason: str


_MAMBA_1 = "packgraph has no scan of Mamba-1 that keeps documents apart"
TWO_ROWS = "an encoder and a decoder read two rows, of other lengths, and attend across"
IMAGES = "images are no tokens; for text alone, pack its text model"
_THREE_AXES = "images are no tokens, and positions of its text model have three axes"
NOT_PACKED: Mapping[str, NotPacked] = MappingProxyType(
    {
        "mamba": NotPacked("Mamba", _MAMBA_1),
        "falcon_mamba": NotPacked("Falcon-Mamba", _MAMBA_1),
        "jamba": NotPacked("Jamba", _MAMBA_1),
        "gemma3": NotPacked("Gemma 3 (images)", IMAGES),
        "llava": NotPacked("LLaVA", IMAGES),
        "qwen2_vl": NotPacked("Qwen2-VL", _THREE_AXES),
        "qwen3_vl": NotPacked("Qwen3-VL", _THREE_AXES),
        "t5": NotPacked("T5", TWO_ROWS),
        "bart": NotPacked("BART", TWO_ROWS),
    }
)


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
# Packages whose forwards of modules see single tokens, or are those of transformers.
FORWARDS = (*AROUND, "peft.", "bitsandbytes.")
ATTENTION = "_attn_implementation"
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
    if (family := FAMILIES.get(kind)) is None:
        config, reason = causal.config, None
        if kind in NOT_PACKED:
            reason = NOT_PACKED[kind].reason
        elif getattr(config, "is_encoder_decoder", False):
            reason = TWO_ROWS
        elif hasattr(config, "vision_config") or hasattr(config, "audio_config"):
            reason = IMAGES
        if reason is not None:
            raise ValueError(f"{type(causal).__name__} cannot be packed: {reason}")
        family = structure_of(causal)
    check_outside(causal, family)
    layers = getattr(causal.base_model, family.layers)
    problems = [*_same_places(layers), *_of_wrapper(model), *_of_attention(causal)]
    if kind not in FAMILIES:
        problems += _of_twin(causal, layers)
    mixers = [*filter(runner_of, causal.modules())]
    inner = {part for mixer in mixers for part in mixer.modules()}.difference(mixers)
    for module in causal.modules():
        if isinstance(module, CROSSING) and module not in inner:
            problems.append(f"{type(module).__name__} reads several rows, and so other documents")
        if hasattr(module, "is_concatenated"):
            problems += expert_problems(module)
        problems += mixer_problems(module) if module not in inner else []
    _refuse(causal, problems)
    return family


def _of_attention(causal: Any) -> list[str]:
    """Implementations of attention that a user has registered, which ours would replace."""
    configs = (getattr(module, "config", None) for module in causal.modules())
    names = {str(getattr(config, ATTENTION, None) or "eager") for config in configs}
    return [
        f"its attention is {name!r}, which packgraph's would replace; choose sdpa or eager"
        for name in sorted(names - {"eager", "sdpa", "flex_attention"})
        if "flash" not in name and not name.startswith("packgraph")
    ]


def _of_twin(causal: Any, layers: Iterable[nn.Module]) -> list[str]:
    """What a twin in evaluation mode, made by the class and the config alone, does not show."""
    problems = [
        f"{type(module).__name__} has a forward of its own, which no proof runs"
        for layer in layers
        for module in layer.modules()
        if not all(
            str(getattr(found, "__module__", "")).startswith(FORWARDS)
            for found in (module.forward, type(module).forward)
        )
    ]
    outside = [
        f"{name} of its decoder is dropout, which would not run"
        for name, module in causal.base_model.named_children()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]
    return problems + outside


def structure_of(causal: Any) -> PackedFamily:
    """What surrounds the layers of a model that departs from nothing, as far as its modules and its
    config tell; whether that is all of it, the proof says. Raises ValueError."""
    decoder, config = causal.base_model, causal.config
    children = dict(decoder.named_children())
    words = [
        name
        for name, module in children.items()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= config.vocab_size
    ]
    lists = [
        name
        for name, module in children.items()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    norms = [name for name in children if "norm" in name or name == "ln_f"]
    rotary = [name for name, module in children.items() if "Rotary" in type(module).__name__]
    if not lists or len(norms) != 1 or len(rotary) > 1 or len(words) != 1:
        raise ValueError(
            f"{type(causal).__name__} cannot be packed: its decoder is not an embedding, layers "
            f"and a norm, but {', '.join(children)}"
        )

    def entry(*found: str) -> str:
        return next((name for name in found if getattr(config, name, None) is not None), "")

    return PackedFamily(
        causal.config.model_type,
        kind="experts" if any(map(_has_experts, causal.modules())) else "dense",
        embedding=words[0],
        layers=lists[0],
        norm=norms[0],
        rotary=rotary[0] if rotary else "",
        scale=entry("embedding_multiplier"),
        divisor=entry("logits_scaling"),
        factor=entry("logit_scale"),
        softcap=entry(_CAP),
    )


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated")


def check_outside(causal: Any, family: PackedFamily) -> None:
    """Raises ValueError, with all reasons, where what surrounds the layers cannot be packed."""
    _refuse(causal, [*_of_parts(causal, family), *_of_config(causal)])


def _refuse(causal: Any, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{type(causal).__name__} cannot be packed: {'; '.join(dict.fromkeys(problems))}"
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
        hooked = has_module_hooks(module)
        problems += [f"{name} has hooks, which would not run"] * hooked
        own = not is_theirs(module)
        problems += [f"{name} has a forward of its own, which would not run"] * own
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
    config = causal.config
    rotary = getattr(config, "rope_parameters", None) or {}
    tables = [rotary, *(table for table in rotary.values() if isinstance(table, dict))]
    problems = {
        f"rotary positions of type {kind!r} depend on the longest document of a call": True
        for kind in {table.get("rope_type") for table in tables} & set(MOVING_ROTARY)
    } | {
        "its loss includes one that balances experts over a whole batch; set "
        "config.output_router_logits = False (in TRL router_aux_loss_coef=0.0 in SFTConfig, "
        "which sets it)": getattr(config, "output_router_logits", False),
        "its loss includes one of all logits; set config.z_loss_coefficient = 0": (
            getattr(config, "z_loss_coefficient", 0)
        ),
        "its loss_function is not the mean of next tokens, which takes its place": (
            getattr(causal.loss_function, "__name__", "") != "ForCausalLMLoss"
        ),
        "its attention is not causal": (
            getattr(config, "use_bidirectional_attention", False)
            or not getattr(config, "is_causal", True)
        ),
        "it attends to an encoder": getattr(config, "add_cross_attention", False),
    }
    return [problem for problem, is_there in problems.items() if is_there]


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
        and not has_module_hooks(head)
        and "forward" not in vars(head)
        and isinstance(head.weight, torch.Tensor)
    )
