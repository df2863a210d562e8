"""The architectures of transformers that a DecoderConfig can be: what each of its fields is called
in a config.json.

    qwen3         grouped queries, one feed-forward block a layer
    qwen3_moe     grouped queries, experts chosen by softmax
    deepseek_v3   latent attention, experts chosen by sigmoid with a bias, the first layers without
                  (Moonlight, too)

Hybrids of Mamba-2 and attention:

    mamba2       M in every layer, no attention
    nemotron_h   one branch a layer, in any order; no rotary positions; feed-forward blocks and
                 experts without gates,
                 experts chosen by sigmoid with a bias, beside shared ones (Nemotron 3)
    bamba        M or attention, then a feed-forward block, in every layer; half of a head's columns
                 are turned

Nemotron-H's time steps are at least `time_step_min`, as transformers has it. mamba2 may keep its
residuals in float32 (residual_in_fp32), which is rounding: here they are of the model's dtype.
Sizes that mean nothing without attention and feed-forward layers are 1 or 2 in a model read from a
config.json of mamba2.

Fields are named with dots: `latent.kv_rank` is the field of a section.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from packgraph.models.branches import read_pattern, write_pattern
from packgraph.models.config import DecoderConfig

SHOWN = 80  # characters
MIXER, ATTENTION = "linear_attention", "full_attention"
OLD_NAMES = MappingProxyType({"mamba": MIXER, "mamba2": MIXER, "attention": ATTENTION})
BRANCHES = MappingProxyType({MIXER: "mamba", ATTENTION: "attn", "mlp": "mlp", "moe": "moe"})
SHARED_WIDTH = "moe_shared_expert_intermediate_size"
_NAMES = (
    (r"^norm\.", "norm_f."),
    (r"^embed_tokens\.", "embeddings."),
    (r"\.input_layernorm\.", ".norm."),
    (r"\.post_attention_layernorm\.", ".norm."),
    (r"\.(mamba|self_attn|mlp)\.", ".mixer."),
)


class Key(NamedTuple):
    """A key of config.json. default: transformers' own where the key is absent; None = the key is
    required.

    null: our value where it is null; None = it must not be. other: a name that some versions write
    instead.
    """

    name: str
    default: Any = None
    null: Any = None
    other: str = ""


Description = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture.

    fields: keys by our fields. only: further keys with the one value that is known here, which is
    also their default there. fixed: our fields that are the same in every model of the family.
    rotary: whether it has rotary positions. complete: fills in, from a config.json, the fields that
    no single key says; the reasons why it makes no sense. write: the keys that follow from several
    fields. refuse: why a config is none of this family. renamed: what of our names of tensors is
    another there: patterns, replaced in order. prefixes: what names begin with in files, but for
    the head's; the first one is written.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, Key]
    only: Mapping[str, Any]
    fixed: Mapping[str, Any]
    rotary: bool = True
    complete: Callable[[Description, dict[str, Any]], list[str]] = lambda description, values: []
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    refuse: Callable[[DecoderConfig], list[str]] = lambda config: []
    renamed: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[str, ...] = ("model.",)

    def tensor_name(self, name: str, prefix: str | None = None) -> str:
        """Name of our tensor `name` (as in a state_dict) in a checkpoint whose names begin with
        `prefix`."""
        if name.startswith("lm_head."):
            return name
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return (self.prefixes[0] if prefix is None else prefix) + name


def kind_of(field: str) -> type:
    """The type of a field by its name with dots."""
    kind: Any = DecoderConfig
    for name in field.split("."):
        kind = kind.__annotations__[name]
    return kind


def cut(value: Any) -> str:
    """A value of a config.json as a message quotes it: not all of a long one."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number too large to be shown"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


_HYBRID = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "tie_embeddings": Key("tie_word_embeddings", False),
}
_ATTENTION = {
    **_HYBRID,
    "intermediate_size": Key("intermediate_size"),
    "num_heads": Key("num_attention_heads"),
    "attention_bias": Key("attention_bias", False),
    "initializer_range": Key("initializer_range", 0.02),
}


def _step_limit(description: Description, values: dict[str, Any]) -> list[str]:
    """Time steps are clamped from below at most. transformers writes infinity as {"__float__":
    "Infinity"}."""
    given = description.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in given)
    except (KeyError, TypeError, ValueError):
        return [f"time_step_limit is {given!r}, not two numbers"]
    values["mamba.smallest_step"] = low
    return (
        []
        if high == math.inf
        else [f"time_step_limit is up to {high}, only unlimited time steps are known"]
    )


def _expansion(config: DecoderConfig) -> list[str]:
    """These architectures say the columns of all heads as a multiple of the hidden size."""
    inner, hidden = config.mamba.inner, config.hidden_size
    return (
        [f"{inner} columns of all heads, which is no multiple of hidden_size {hidden}"]
        if inner % hidden
        else []
    )


def _read_mamba2(description: Description, values: dict[str, Any]) -> list[str]:
    values |= {
        "pattern": "M",
        "intermediate_size": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
        "qk_norm": False,
    }
    inner = description.get("expand", 2) * values["hidden_size"]
    own = values["mamba.num_heads"] * values["mamba.head_dim"]
    return _step_limit(description, values) + (
        [] if inner == own else [f"expand x hidden_size is {inner}, num_heads x head_dim {own}"]
    )


def _write_mamba2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "expand": config.mamba.inner // config.hidden_size,
        "residual_in_fp32": False,
        "time_step_limit": [config.mamba.smallest_step, math.inf],
    }


def _read_nemotron(description: Description, values: dict[str, Any]) -> list[str]:
    """The layers, by a list of names or the older pattern of letters, which is ours."""
    named = description.get("layers_block_type") or description.get("layer_types")
    pattern = description.get("hybrid_override_pattern")
    if named is None and pattern is None:
        return ["layers_block_type is missing"]
    if named is None:
        try:
            layers = list(read_pattern(str(pattern)))
        except ValueError as error:
            return [str(error)]
    else:
        names = [OLD_NAMES.get(name, name) for name in named]
        if unknown := sorted(set(names) - set(BRANCHES)):
            return [f"layers_block_type has {', '.join(unknown)}; known are {', '.join(BRANCHES)}"]
        layers = [(BRANCHES[name],) for name in names]
    values |= {"num_layers": len(layers), "pattern": write_pattern(layers)}
    reasons = [] if ("mamba",) in layers else ["no Mamba-2 layers"]
    if ("moe",) not in layers:
        values["experts.count"] = (
            0  # the keys of experts are written, or have defaults, without such layers too
        )
        return reasons
    shared, one = description.get(SHARED_WIDTH, 7688), values["experts.intermediate_size"]
    whole = isinstance(shared, int) and shared > 0 and one > 0 and shared % one == 0
    values["experts.shared"] = shared // one if whole else 0
    return (
        reasons
        if whole
        else [*reasons, f"{SHARED_WIDTH} is {shared!r}, no multiple of moe_intermediate_size {one}"]
    )


def _write_nemotron(config: DecoderConfig) -> dict[str, Any]:
    names = {branch: name for name, branch in BRANCHES.items()}
    return {
        "num_hidden_layers": config.num_layers,
        "layers_block_type": [
            names[config.branches(index)[0]] for index in range(config.num_layers)
        ],
        "expand": max(1, config.mamba.inner // config.hidden_size),
        "n_shared_experts": 1,
        SHARED_WIDTH: config.experts.shared * config.experts.intermediate_size,
        "moe_latent_size": config.experts.latent_size or None,
    }


def _refuse_nemotron(config: DecoderConfig) -> list[str]:
    layers = [config.branches(index) for index in range(config.num_layers)]
    others = {branch for layer in layers for branch in layer} - set(BRANCHES.values())
    problems = {
        f"layers of {', '.join(sorted(others))}": bool(others),
        "layers of two branches": any(len(layer) > 1 for layer in layers),
        "experts.shared=0": ("moe",) in layers and not config.experts.shared,
        "no Mamba-2 layers": ("mamba",) not in layers,
    }
    return [text for text, wrong in problems.items() if wrong]


def _read_bamba(description: Description, values: dict[str, Any]) -> list[str]:
    hidden, heads = values["hidden_size"], values["mamba.num_heads"]
    attending = description.get("attn_layer_indices") or []
    expand, head = description.get("mamba_expand", 2), description.get("mamba_d_head", "auto")
    values |= {
        "pattern": write_pattern(
            [
                ("attn" if layer in attending else "mamba", "mlp")
                for layer in range(values["num_layers"])
            ]
        ),
        "head_dim": description.get("head_dim") or hidden // max(1, values["num_heads"]),
        "mamba.head_dim": expand * hidden // max(1, heads) if head == "auto" else head,
    }
    rope = description.get("rope_parameters")
    share = rope.get("partial_rotary_factor", 0.5) if isinstance(rope, dict) else 0.5
    values["rotary_share"] = float(share)
    return _step_limit(description, values) + (
        []
        if values["mamba.head_dim"] * heads == expand * hidden
        else [f"mamba_d_head x mamba_n_heads is not mamba_expand x hidden_size ({expand * hidden})"]
    )


def _write_bamba(config: DecoderConfig) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.rotary_share,
    }
    return {
        "attn_layer_indices": [
            index for index in range(config.num_layers) if "attn" in config.branches(index)
        ],
        "head_dim": config.head_dim,
        "mamba_d_head": config.mamba.head_dim,
        "mamba_expand": config.mamba.inner // config.hidden_size,
        "rope_parameters": rope,
        "partial_rotary_factor": config.rotary_share,
        "time_step_limit": [config.mamba.smallest_step, math.inf],
    }


def _refuse_bamba(config: DecoderConfig) -> list[str]:
    kinds = {config.branches(index) for index in range(config.num_layers)}
    return _expansion(config) + [
        f"layers of {' and '.join(kind)}"
        for kind in sorted(kinds - {("mamba", "mlp"), ("attn", "mlp")})
    ]


MAMBA2 = Family(
    "Mamba2ForCausalLM",
    "mamba2",
    MappingProxyType(
        {
            **_HYBRID,
            "num_layers": Key("num_hidden_layers"),
            "rms_norm_eps": Key("layer_norm_epsilon", 1e-5),
            "initializer_range": Key("initializer_range", 0.1),
            "mamba.num_heads": Key("num_heads", 128),
            "mamba.head_dim": Key("head_dim", 64),
            "mamba.state": Key("state_size", 128),
            "mamba.groups": Key("n_groups", 8),
            "mamba.conv_width": Key("conv_kernel", 4),
            "mamba.conv_bias": Key("use_conv_bias", True),
            "mamba.bias": Key("use_bias", False),
            "mamba.chunk": Key("chunk_size", 256),
        }
    ),
    MappingProxyType({"hidden_act": "silu"}),
    MappingProxyType({}),
    rotary=False,
    complete=_read_mamba2,
    write=_write_mamba2,
    refuse=_expansion,
    renamed=_NAMES,
    prefixes=("backbone.",),
)

NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    MappingProxyType(
        {
            **_ATTENTION,
            "num_kv_heads": Key("num_key_value_heads", 8),
            "head_dim": Key("head_dim", 128, other="attention_head_dim"),
            "rms_norm_eps": Key("layer_norm_epsilon", 1e-5),
            "max_position_embeddings": Key("max_position_embeddings", 4096),
            "mamba.num_heads": Key("mamba_num_heads", 128),
            "mamba.head_dim": Key("mamba_head_dim", 64),
            "mamba.state": Key("ssm_state_size", 128),
            "mamba.groups": Key("n_groups", 8),
            "mamba.conv_width": Key("conv_kernel", 4),
            "mamba.conv_bias": Key("use_conv_bias", True),
            "mamba.bias": Key("use_bias", False),
            "mamba.chunk": Key("chunk_size", 128),
            "mamba.smallest_step": Key("time_step_min", 0.001),
            "experts.count": Key("n_routed_experts", 8),
            "experts.per_token": Key("num_experts_per_tok", 2),
            "experts.intermediate_size": Key("moe_intermediate_size", 7688),
            "experts.latent_size": Key("moe_latent_size", null=0),
            "experts.normalise": Key("norm_topk_prob", True),
            "experts.scaling": Key("routed_scaling_factor", 1.0),
            "experts.groups": Key("n_group", 1),
            "experts.groups_kept": Key("topk_group", 1),
        }
    ),
    MappingProxyType(
        {
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "sliding_window": None,
            "num_nextn_predict_layers": 0,
        }
    ),
    MappingProxyType(
        {
            "qk_norm": False,
            "activation": "relu2",
            "rotary_share": 0.0,
            "attention_bias": False,
            "experts.score": "sigmoid",
            "experts.score_bias": True,
            "experts.first_dense": 0,
        }
    ),
    rotary=False,
    complete=_read_nemotron,
    write=_write_nemotron,
    refuse=_refuse_nemotron,
    renamed=_NAMES,
    prefixes=("backbone.", "model."),
)

BAMBA = Family(
    "BambaForCausalLM",
    "bamba",
    MappingProxyType(
        {
            **_ATTENTION,
            "num_layers": Key("num_hidden_layers"),
            "num_kv_heads": Key("num_key_value_heads", 8),
            "rms_norm_eps": Key("rms_norm_eps", 1e-5),
            "max_position_embeddings": Key("max_position_embeddings", 262144),
            "mamba.num_heads": Key("mamba_n_heads", 128),
            "mamba.state": Key("mamba_d_state", 256),
            "mamba.groups": Key("mamba_n_groups", 1),
            "mamba.conv_width": Key("mamba_d_conv", 4),
            "mamba.conv_bias": Key("mamba_conv_bias", True),
            "mamba.bias": Key("mamba_proj_bias", False),
            "mamba.chunk": Key("mamba_chunk_size", 256),
        }
    ),
    MappingProxyType({"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False}),
    MappingProxyType({"qk_norm": False, "activation": "swiglu"}),
    complete=_read_bamba,
    write=_write_bamba,
    refuse=_refuse_bamba,
    renamed=(
        (r"^norm\.", "final_layernorm."),
        (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
        (r"\.mlp\.", ".feed_forward."),
    ),
)

HYBRIDS = (MAMBA2, NEMOTRON_H, BAMBA)


_COMMON = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("intermediate_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "rms_norm_eps": Key("rms_norm_eps", 1e-6),
    "tie_embeddings": Key("tie_word_embeddings", False),
    "attention_bias": Key("attention_bias", False),
    "initializer_range": Key("initializer_range", 0.02),
    "max_position_embeddings": Key("max_position_embeddings", 32768),
}
_GROUPED = {**_COMMON, "num_kv_heads": Key("num_key_value_heads")}
_EVERYWHERE = {"hidden_act": "silu", "attention_dropout": 0.0}
_NO_WINDOW = {"use_sliding_window": False}
_PLAIN = {"pattern": "", "activation": "swiglu", "rotary_share": 1.0}

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    MappingProxyType({**_GROUPED, "head_dim": Key("head_dim", 128)}),
    MappingProxyType({**_EVERYWHERE, **_NO_WINDOW}),
    MappingProxyType({**_PLAIN, "qk_norm": True}),
)

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    MappingProxyType(
        {
            **_GROUPED,
            "head_dim": Key("head_dim"),
            "experts.count": Key("num_experts", other="num_local_experts"),
            "experts.per_token": Key("num_experts_per_tok", 8),
            "experts.intermediate_size": Key("moe_intermediate_size", 768),
            "experts.normalise": Key("norm_topk_prob", False),
        }
    ),
    MappingProxyType(
        {**_EVERYWHERE, **_NO_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    ),
    MappingProxyType(
        {
            **_PLAIN,
            "qk_norm": True,
            "experts.score": "softmax",
            "experts.score_bias": False,
            "experts.shared": 0,
            "experts.first_dense": 0,
            "experts.scaling": 1.0,
            "experts.groups": 1,
            "experts.groups_kept": 1,
            "experts.latent_size": 0,
        }
    ),
)


def _read_deepseek(description: Description, values: dict[str, Any]) -> list[str]:
    """Fill in the fields that mean nothing with latent attention; the reasons why a config.json
    makes no sense."""
    keys, heads = description.get("num_key_value_heads"), values["num_heads"]
    dense, layers = values["experts.first_dense"], values["num_layers"]
    problems = {
        f"kv_lora_rank is {values['latent.kv_rank']}, must be positive": (
            values["latent.kv_rank"] <= 0
        ),
        f"num_key_value_heads is {keys!r}, not num_attention_heads ({heads}) as with latent "
        "attention": keys not in (None, heads),
        f"n_routed_experts is 0, but only {dense} of {layers} layers are without experts": (
            not values["experts.count"] and dense < layers
        ),
    }
    values |= {
        "num_kv_heads": heads,
        "head_dim": values["latent.nope_dim"] + values["latent.rope_dim"],
        "qk_norm": False,
    }
    return [problem for problem, is_there in problems.items() if is_there]


def _write_deepseek(config: DecoderConfig) -> dict[str, Any]:
    dense = {} if config.experts.enabled else {"first_k_dense_replace": config.num_layers}
    return {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.latent.query_rank or None,
        **dense,
    }


def _refuse_deepseek(config: DecoderConfig) -> list[str]:
    needs_shared = config.experts.enabled and not config.experts.shared
    return ["experts.shared=0"] if needs_shared else []


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    MappingProxyType(
        {
            **_COMMON,
            "max_position_embeddings": Key("max_position_embeddings", 4096),
            "mtp_layers": Key("num_nextn_predict_layers", 0, null=0),
            "latent.kv_rank": Key("kv_lora_rank", 512),
            "latent.query_rank": Key("q_lora_rank", 1536, null=0),
            "latent.nope_dim": Key("qk_nope_head_dim", 128),
            "latent.rope_dim": Key("qk_rope_head_dim", 64),
            "latent.value_dim": Key("v_head_dim", 128),
            "latent.interleaved": Key("rope_interleave", True),
            "experts.count": Key("n_routed_experts", 256, null=0),
            "experts.per_token": Key("num_experts_per_tok", 8),
            "experts.intermediate_size": Key("moe_intermediate_size", 2048),
            "experts.shared": Key("n_shared_experts", 1, null=0),
            "experts.first_dense": Key("first_k_dense_replace", 3),
            "experts.normalise": Key("norm_topk_prob", True),
            "experts.scaling": Key("routed_scaling_factor", 2.5),
            "experts.groups": Key("n_group", 8, null=1),
            "experts.groups_kept": Key("topk_group", 4, null=1),
        }
    ),
    MappingProxyType(
        {**_EVERYWHERE, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    ),
    MappingProxyType(
        {**_PLAIN, "experts.score": "sigmoid", "experts.score_bias": True, "experts.latent_size": 0}
    ),
    complete=_read_deepseek,
    write=_write_deepseek,
    refuse=_refuse_deepseek,
)

FAMILIES = (QWEN3, QWEN3_MOE, DEEPSEEK_V3, *HYBRIDS)
RECORDED = (
    "initializer_range",
    "max_position_embeddings",
)  # in a config.json, but no part of what weights compute


def family_of(config: DecoderConfig) -> Family:
    """The only family that may have such a model.

    Mamba-2 layers alone are mamba2 or nemotron_h: the values that every Nemotron-H has for
    feed-forward and attention layers, which a reader of a checkpoint sets and no other architecture
    has, tell the two apart.
    """
    if not config.pattern:
        grouped = QWEN3_MOE if config.experts.enabled else QWEN3
        return DEEPSEEK_V3 if config.latent.enabled else grouped
    kinds = {config.branches(index) for index in range(config.num_layers)}
    if kinds != {("mamba",)}:
        return BAMBA if any(len(kind) > 1 for kind in kinds) else NEMOTRON_H
    fixed = [field for field in NEMOTRON_H.fixed.items() if not field[0].startswith("experts.")]
    is_nemotron = all(attrgetter(name)(config) == value for name, value in fixed)
    return NEMOTRON_H if is_nemotron else MAMBA2
