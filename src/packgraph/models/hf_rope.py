"""Rotary positions in a config.json: old files have rope_theta and rope_scaling, new ones one
rope_parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packgraph.models.latent_config import RopeScaling

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


@dataclass
class Rope:
    """What a config.json says of rotary positions, and every reason why it is not known here."""

    theta: Any = 10000.0
    scaling: RopeScaling = field(default_factory=RopeScaling)
    reasons: list[str] = field(default_factory=list)


def read_rope(description: Mapping[str, Any], *, scaled: bool) -> Rope:
    """What `description`, a parsed config.json, says. scaled: whether the architecture may scale
    positions (YaRN)."""
    found = Rope()
    scalings = [
        _scaling(description[place], place, description, scaled, found.reasons)
        for place in PLACES
        if description.get(place)
    ]
    if len(set(scalings)) > 1:
        found.reasons.append(f"{' and '.join(PLACES)} scale positions differently")
    found.scaling = scalings[0] if scalings else found.scaling
    parameters = description.get("rope_parameters") or {}
    inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    found.theta = description.get("rope_theta", 10000.0) if inner is None else inner
    if not _is_number(found.theta):
        found.reasons.append(f"rope_theta is {found.theta!r}, not float")
    return found


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
        if not _is_number(values[name])
    ]
    reasons += unknown + wrong
    return RopeScaling() if wrong else RopeScaling(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
