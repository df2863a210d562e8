"""Translation between Hugging Face's config.json of Qwen3 and DecoderConfig, as pure functions.

What a DecoderConfig cannot express (sliding windows, scaled rotary positions, quantised weights, ...) is
refused, all reasons at once: ignoring it would load a model that computes something else.
"""
from collections.abc import Mapping
from typing import Any

import torch

from packgraph.models.config import DecoderConfig

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# our field: (their key, their default; None = required)
FIELDS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "intermediate_size": ("intermediate_size", None),
    "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", 128),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "attention_bias": ("attention_bias", False),
    "initializer_range": ("initializer_range", 0.02),
    "max_position_embeddings": ("max_position_embeddings", 32768),
}


def config_from_json(description: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a parsed config.json. Raises ValueError with every reason why there is none."""
    reasons = _unsupported(description)
    values: dict[str, Any] = {"rope_theta": _rope_theta(description)}
    for field, (key, default) in FIELDS.items():
        value = description.get(key, default)
        kind = DecoderConfig.__annotations__[field]
        if value is None:
            reasons.append(f"{key} is missing")
        elif not _is(value, kind):
            reasons.append(f"{key} is {value!r}, not {kind.__name__}")
        values[field] = value
    if not _is(values["rope_theta"], float):
        reasons.append(f"rope_theta is {values['rope_theta']!r}, not float")
    if reasons:
        raise ValueError("no Qwen3 model that can be loaded here: " + "; ".join(reasons))
    return DecoderConfig(**values)


def config_to_json(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `config`, in the keys that old and new versions of transformers read.

    Raises ValueError when Qwen3 has no such model.
    """
    if not config.qk_norm:
        raise ValueError(f"{ARCHITECTURE} always normalises queries and keys; a model with qk_norm=False cannot "
                         "be saved as one.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key: getattr(config, field) for field, (key, _) in FIELDS.items()},
    }


def stored_dtype(description: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, float32 when it names none. Raises ValueError for an unknown one."""
    name = description.get("dtype") or description.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return kind is bool
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _rope_theta(description: Mapping[str, Any]) -> Any:
    parameters = description.get("rope_parameters") or {}
    inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return description.get("rope_theta", 10000.0) if inner is None else inner


def _unsupported(description: Mapping[str, Any]) -> list[str]:
    """Every feature of a config.json that DecoderConfig cannot express."""
    reasons = []
    architectures = description.get("architectures") or [description.get("model_type")]
    if architectures not in ([ARCHITECTURE], ["qwen3"]):
        reasons.append(f"the architecture is {architectures}, only {ARCHITECTURE} is known")
    if description.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act is {description['hidden_act']!r}, only 'silu' is known")
    if description.get("attention_dropout"):
        reasons.append("attention_dropout is not 0")
    if description.get("use_sliding_window") or "sliding_attention" in (description.get("layer_types") or []):
        reasons.append("layers with a sliding window")
    for key in ("rope_parameters", "rope_scaling"):
        rope = description.get(key) or {}
        plain = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
        if not plain or rope.get("rope_type", rope.get("type", "default")) != "default":
            reasons.append(f"{key} is {rope!r}, only unscaled rotary positions are known")
    if description.get("quantization_config"):
        reasons.append("the weights are quantised")
    return reasons
