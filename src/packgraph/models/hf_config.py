"""Translation between Hugging Face's config.json and DecoderConfig, as pure functions.

What a DecoderConfig cannot express (sliding windows, most scalings of positions, quantised weights,
...) is refused, all reasons at once: ignoring it would load a model that computes something else.
What only training knows (dropout, losses that balance experts) stands in no config.json here.

Old files have rope_theta and rope_scaling, new ones one rope_parameters; both are read.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from packgraph.models.config import (
    LARGEST,
    LARGEST_SIZE,
    DecoderConfig,
    ExpertConfig,
    LatentConfig,
    MambaConfig,
    RopeScaling,
)
from packgraph.models.hf_families import (
    DEEPSEEK_V3,
    FAMILIES,
    RECORDED,
    Family,
    Key,
    cut,
    family_of,
    kind_of,
)

THETA = 10000.0  # where no file says another
PLACES = ("rope_parameters", "rope_scaling")
# our field: (their key, their default; None = required)
_FIELDS: dict[str, tuple[str, Any]] = {
    "factor": ("factor", None),
    "original_positions": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 0.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
_KNOWN = {"rope_type", "type", "rope_theta", *(key for key, _ in _FIELDS.values())}
# What has no effect at these values; any other means something that RopeScaling cannot say.
_WITHOUT_EFFECT = {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}
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


def read_rope(
    description: Mapping[str, Any], *, scaled: bool
) -> tuple[Any, RopeScaling, list[str]]:
    """Reads rotary positions from `description`, a parsed config.json: theta, scaling, and every
    reason why one is not known here. scaled: whether the architecture may scale positions
    (YaRN)."""
    reasons: list[str] = []
    scalings = [
        _scaling(description[place], place, description, scaled, reasons)
        for place in PLACES
        if description.get(place)
    ]
    if len(set(scalings)) > 1:
        reasons.append(f"{' and '.join(PLACES)} scale positions differently")
    parameters = description.get("rope_parameters") or {}
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = description.get("rope_theta", THETA) if theta is None else theta
    if not _is(theta, float):
        reasons.append(f"rope_theta is {theta!r}, not float")
    return theta, scalings[0] if scalings else RopeScaling(), reasons


def write_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """The keys of a config.json that old and new versions of transformers read."""
    if not scaling.enabled:
        return {
            "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    values = {
        key: getattr(scaling, name)
        for name, (key, default) in _FIELDS.items()
        if default != 0.0 or getattr(scaling, name)
    }
    return {
        "rope_theta": theta,
        "rope_scaling": {"type": "yarn", **values},
        "rope_parameters": {"rope_type": "yarn", "rope_theta": theta, **values},
    }


def _scaling(
    rope: Any, place: str, description: Mapping[str, Any], scaled: bool, reasons: list[str]
) -> RopeScaling:
    """The scaling in one place, or none and reasons."""
    plain = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    kind = rope.get("rope_type", rope.get("type", "default")) if plain else None
    if kind == "default":
        return RopeScaling()
    if kind != "yarn" or not scaled:
        known = (
            "unscaled rotary positions and yarn are" if scaled else "unscaled rotary positions are"
        )
        reasons.append(f"{place} is {rope!r}, only {known} known")
        return RopeScaling()
    unknown = [
        f"{place}.{key} is {value!r}, which is not known with yarn"
        for key, value in rope.items()
        if key not in _KNOWN and (key not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[key])
    ]
    # As transformers has it: without a number of its own, the one of the whole model.
    rope = {"original_max_position_embeddings": description.get("max_position_embeddings"), **rope}
    values = {
        name: default if rope.get(key) is None else rope[key]
        for name, (key, default) in _FIELDS.items()
    }
    wrong = [
        f"{place}.{key} is {values[name]!r}, not a number"
        for name, (key, _) in _FIELDS.items()
        if not _is(values[name], float)
    ]
    reasons += unknown + wrong
    return RopeScaling() if wrong else RopeScaling(**values)


def config_from_json(description: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a parsed config.json. Raises ValueError with every reason why there is
    none."""
    family = family_from(description)
    reasons: list[str] = []
    values: dict[str, Any] = dict(family.fixed)
    for field, key in family.fields.items():
        if (value := _read(description, key)) is None:
            reasons.append(f"{key.name} is missing")
        elif not _is(value, kind_of(field)):
            reasons.append(f"{key.name} is {cut(value)}, not {kind_of(field).__name__}")
        elif isinstance(value, int) and value > LARGEST.get(field, LARGEST_SIZE):
            reasons.append(
                f"{key.name} is {cut(value)}, must be at most {LARGEST.get(field, LARGEST_SIZE):,}"
            )
        values[field] = value
    theta, scaling, wrong = THETA, RopeScaling(), list[str]()
    if family.rotary:
        theta, scaling, wrong = read_rope(description, scaled=family is DEEPSEEK_V3)
    reasons += _unsupported(description, family) + wrong
    if not reasons:
        reasons += family.complete(description, values)
    if reasons:
        raise ValueError(f"no {family.architecture} that can be loaded here: " + "; ".join(reasons))
    return _build({**values, "rope_theta": theta}, scaling)


def config_to_json(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `config`, in the keys that old and new versions of transformers read.

    Raises ValueError when transformers has no such model.
    """
    family = family_of(config)
    differing = [
        f"{field}={attrgetter(field)(config)!r}"
        for field, value in family.fixed.items()
        if (config.experts.enabled or not field.startswith("experts."))
        and attrgetter(field)(config) != value
    ]
    if differing := differing + family.refuse(config):
        raise ValueError(
            f"{family.architecture} has no model with {', '.join(differing)}; this one cannot be "
            "saved "
            "as one."
        )
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{
            key: list(value) if isinstance(value, tuple) else value
            for key, value in family.only.items()
        },
        **(write_rope(config.rope_theta, config.latent.scaling) if family.rotary else {}),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key.name: attrgetter(field)(config) for field, key in family.fields.items()},
        **family.write(config),
    }


def stored_dtype(description: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, float32 when it names none. Raises ValueError for an
    unknown one."""
    name = description.get("dtype") or description.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype is {cut(name)}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def shape_values(config: DecoderConfig) -> dict[str, Any]:
    """The values of all SHAPE fields, by their names with dots."""
    return {field: attrgetter(field)(config) for field in SHAPE}


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


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python
        return kind is bool
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _unsupported(description: Mapping[str, Any], family: Family) -> list[str]:
    """Every feature of a config.json that DecoderConfig cannot express."""
    # An empty list is as good as an empty tuple.
    reasons = [
        f"{key} is {cut(value)}, only {known!r} is known"
        for key, known in family.only.items()
        if (value := description.get(key)) is not None and (value or known) and value != known
    ]
    layer_types = description.get("layer_types") or []
    if not isinstance(layer_types, list):
        reasons.append(f"layer_types is {cut(layer_types)}, not a list")
    elif "sliding_attention" in layer_types:
        reasons.append("layers with a sliding window")
    if description.get("quantization_config"):
        reasons.append("the weights are quantised")
    return reasons
