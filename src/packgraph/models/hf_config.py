"""Translation between Hugging Face's config.json and DecoderConfig, as pure functions.

What a DecoderConfig cannot express (sliding windows, most scalings of positions, quantised weights,
...) is refused, all reasons at once: ignoring it would load a model that computes something else.
What only training knows (dropout, losses that balance experts) stands in no config.json here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packgraph.models.config import LARGEST, LARGEST_SIZE, DecoderConfig
from packgraph.models.expert_config import ExpertConfig
from packgraph.models.hf_families import DEEPSEEK_V3, FAMILIES, RECORDED, family_of
from packgraph.models.hf_family import Family, Key, cut, kind_of, value_of
from packgraph.models.hf_rope import Rope, read_rope, write_rope
from packgraph.models.latent_config import LatentConfig, RopeScaling
from packgraph.models.mamba_config import MambaConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Fields that decide which function weights compute, by their names with dots.
SHAPE: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            field
            for family in FAMILIES
            for field in (*family.fields, *family.fixed)
            if field not in RECORDED
        ]
        + ["rope_theta", "rotary_share", "mamba.head_dim", "mamba.smallest_step"]
        + [f"latent.scaling.{name}" for name in RopeScaling.__annotations__]
    )
)


def config_from_json(description: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a parsed config.json. Raises ValueError with every reason why there is
    none."""
    family = family_from(description)
    reasons: list[str] = []
    values: dict[str, Any] = dict(family.fixed)
    for field, key in family.fields.items():
        value = _read(description, key)
        if value is None:
            reasons.append(f"{key.name} is missing")
        elif not _is(value, kind_of(field)):
            reasons.append(f"{key.name} is {cut(value)}, not {kind_of(field).__name__}")
        elif isinstance(value, int) and value > LARGEST.get(field, LARGEST_SIZE):
            reasons.append(
                f"{key.name} is {cut(value)}, must be at most {LARGEST.get(field, LARGEST_SIZE):,}"
            )
        values[field] = value
    rope = read_rope(description, scaled=family is DEEPSEEK_V3) if family.rotary else Rope()
    reasons += _unsupported(description, family) + rope.reasons
    if family is DEEPSEEK_V3 and not reasons:
        reasons += _complete_latent(description, values)
    if not reasons:
        reasons += family.complete(description, values)
    if reasons:
        raise ValueError(f"no {family.architecture} that can be loaded here: " + "; ".join(reasons))
    return _build({**values, "rope_theta": rope.theta}, rope.scaling)


def config_to_json(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `config`, in the keys that old and new versions of transformers read.

    Raises ValueError when transformers has no such model.
    """
    family = family_of(config)
    if differing := [*_not_of(family, config), *family.refuse(config)]:
        raise ValueError(
            f"{family.architecture} has no model with {', '.join(differing)}; this one cannot be "
            "saved "
            "as one."
        )
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{
            key: list(value) if isinstance(value, tuple) else value
            for key, value in family.only.items()
        },
        **(write_rope(config.rope_theta, config.latent.scaling) if family.rotary else {}),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key.name: value_of(config, field) for field, key in family.fields.items()},
        **family.write(config),
    }
    if family is DEEPSEEK_V3:
        content |= {
            "num_key_value_heads": config.num_heads,
            "q_lora_rank": config.latent.query_rank or None,
        }
        if not config.experts.enabled:
            content["first_k_dense_replace"] = config.num_layers
    return content


def stored_dtype(description: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, float32 when it names none. Raises ValueError for an
    unknown one."""
    name = description.get("dtype") or description.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype is {cut(name)}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def shape_values(config: DecoderConfig) -> dict[str, Any]:
    """The values of all SHAPE fields, by their names with dots."""
    return {field: value_of(config, field) for field in SHAPE}


def family_from(description: Mapping[str, Any]) -> Family:
    """The architecture of a parsed config.json. Raises ValueError for one that is not known
    here."""
    architectures = description.get("architectures") or [description.get("model_type")]
    for family in FAMILIES:
        if architectures in ([family.architecture], [family.model_type]):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(
        "no model that can be loaded here: "
        f"the architecture is {cut(architectures)}, only {known} are known"
    )


def _read(description: Mapping[str, Any], key: Key) -> Any:
    """The value of `key`, None when there is none."""
    name = key.other if key.name not in description and key.other else key.name
    value = description.get(name, key.default)
    return key.null if value is None else value


def _build(values: Mapping[str, Any], scaling: RopeScaling) -> DecoderConfig:
    """A config of fields by their names with dots. Raises ValueError for illegal values."""

    def section(prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): value
            for name, value in values.items()
            if name.startswith(prefix)
        }

    top = {name: value for name, value in values.items() if "." not in name}
    experts = section("experts.")
    return DecoderConfig(
        **top,
        latent=LatentConfig(**section("latent."), scaling=scaling),
        experts=ExpertConfig(**experts) if experts.get("count") else ExpertConfig(),
        mamba=MambaConfig(**section("mamba.")),
    )


def _complete_latent(description: Mapping[str, Any], values: dict[str, Any]) -> list[str]:
    """Fill in the fields that mean nothing with latent attention; the reasons why a config.json
    makes no sense."""
    reasons = []
    if values["latent.kv_rank"] <= 0:
        reasons.append(f"kv_lora_rank is {values['latent.kv_rank']}, must be positive")
    keys, heads = description.get("num_key_value_heads"), values["num_heads"]
    if keys not in (None, heads):
        reasons.append(
            f"num_key_value_heads is {keys!r}, not num_attention_heads ({heads}) as with latent "
            "attention"
        )
    if not values["experts.count"] and values["experts.first_dense"] < values["num_layers"]:
        reasons.append(
            f"n_routed_experts is 0, but only {values['experts.first_dense']} of "
            f"{values['num_layers']} "
            "layers are without experts"
        )
    values |= {
        "num_kv_heads": heads,
        "head_dim": values["latent.nope_dim"] + values["latent.rope_dim"],
        "qk_norm": False,
    }
    return reasons


def _not_of(family: Family, config: DecoderConfig) -> Sequence[str]:
    """Fields of `config` that no model of `family` has, with their values."""
    fixed = {
        field: value
        for field, value in family.fixed.items()
        if config.experts.enabled or not field.startswith("experts.")
    }
    found = [
        f"{field}={value_of(config, field)!r}"
        for field, value in fixed.items()
        if value_of(config, field) != value
    ]
    if family is DEEPSEEK_V3 and config.experts.enabled and not config.experts.shared:
        found.append("experts.shared=0")
    return found


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return kind is bool
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _unsupported(description: Mapping[str, Any], family: Family) -> list[str]:
    """Every feature of a config.json that DecoderConfig cannot express."""
    reasons = []
    for key, known in family.only.items():
        value = description.get(key)
        if (
            value is not None and (value or known) and value != known
        ):  # an empty list is as good as an empty tuple
            reasons.append(f"{key} is {cut(value)}, only {known!r} is known")
    layer_types = description.get("layer_types") or []
    if not isinstance(layer_types, list):
        reasons.append(f"layer_types is {cut(layer_types)}, not a list")
    elif "sliding_attention" in layer_types:
        reasons.append("layers with a sliding window")
    if description.get("quantization_config"):
        reasons.append("the weights are quantised")
    return reasons
