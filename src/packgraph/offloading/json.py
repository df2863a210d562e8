"""Traces of offloading as JSON, so that a plan can be made, compared and drawn away from the
machine.

    {"format": "packgraph offload trace 1", "speed": {...} or null,
     "trace": {"forward_us": ..., "backward_us": ..., "slots": ..., "other_bytes": ..., "groups":
     [{"name": ...}, ...]}}

Fields are those of the dataclasses in `offloading/plan.py`, and numbers come back as they were, to
the last bit.
"""

import json
from dataclasses import asdict, fields
from typing import Any

from packgraph.offloading.plan import CopySpeed, OffloadGroup, OffloadTrace

FORMAT = "packgraph offload trace 1"
WHOLE = ("layer", "bytes", "copies", "part", "slots", "other_bytes", "forward_room")
WHOLES = ("backward_room", "stays")
OPTIONAL = ("forward_room", "part", "backward_room", "stays")  # files of before there were any


def to_json(trace: OffloadTrace, speed: CopySpeed | None = None) -> str:
    """The text of a file, one group per line."""
    told = {
        field.name: getattr(trace, field.name) for field in fields(trace) if field.name != "groups"
    }
    groups = ",\n".join("   " + json.dumps(asdict(group)) for group in trace.groups)
    return (
        f'{{"format": {json.dumps(FORMAT)},\n "speed": '
        f"{json.dumps(asdict(speed) if speed else None)},\n"
        f' "trace": {json.dumps(told)[:-1]}, "groups": [\n{groups}]}}}}\n'
    )


def from_json(text: str) -> tuple[OffloadTrace, CopySpeed | None]:
    """Read what `to_json` writes. Raises ValueError that says what is wrong, and where."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this text is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        told = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"this is no trace of offloading: its format must be {FORMAT!r}, not {told!r}"
        )
    errors: list[str] = []
    speed = (
        None if found.get("speed") is None else _read(CopySpeed, found["speed"], "speed", errors)
    )
    told = found.get("trace")
    groups = told.get("groups") if isinstance(told, dict) else None
    if not isinstance(groups, list):
        errors.append("trace.groups must be a list of groups")
        groups = []
    read = tuple(
        _read(OffloadGroup, group, f"group {index}", errors) for index, group in enumerate(groups)
    )
    rest = (
        {key: value for key, value in told.items() if key != "groups"}
        if isinstance(told, dict)
        else {}
    )
    values = _values(OffloadTrace, rest, "trace", errors, without=("groups",))
    if errors:
        raise ValueError("this is no trace of offloading:\n  - " + "\n  - ".join(errors))
    return OffloadTrace(groups=read, **values), speed


def _read(kind: type, found: Any, place: str, errors: list[str]) -> Any:
    count = len(errors)
    values = _values(kind, found, place, errors)
    return kind(**values) if len(errors) == count else None


def _values(
    kind: Any, found: Any, place: str, errors: list[str], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The fields of `kind` out of a JSON object; what is wrong with them is added to `errors`."""
    if not isinstance(found, dict):
        errors.append(f"{place} must be an object, not {found!r}")
        return {}
    names = [field.name for field in fields(kind) if field.name not in without]
    errors += [
        f"{place} has a field {name!r}, known are {', '.join(names)}"
        for name in found
        if name not in names
    ]
    errors += [
        f"{place} has no {name}" for name in names if name not in found and name not in OPTIONAL
    ]
    for name in names:
        if name in found and not _fits(name, found[name]):
            wanted = (
                "text"
                if name == "name"
                else "a list of whole numbers"
                if name in WHOLES
                else "a whole number"
                if name in WHOLE
                else "a number"
            )
            errors.append(f"{name} of {place} must be {wanted}, not {found[name]!r}")
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }


def _fits(name: str, value: Any) -> bool:
    if name == "name":
        return isinstance(value, str)
    if name in WHOLES:
        return isinstance(value, list) and all(type(each) is int for each in value)
    return isinstance(value, int if name in WHOLE else (int, float)) and not isinstance(value, bool)
