"""Traces of trainings: tensors by name, for every step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Trace = Sequence[Mapping[str, torch.Tensor | None]]


def differences(left: Trace | Mapping[str, Any], right: Trace | Mapping[str, Any]) -> list[str]:
    """Names of what differs in two traces, or in what holds them as `trace`, with the step."""
    traces = [found["trace"] if isinstance(found, Mapping) else found for found in (left, right)]
    different = []
    for step, (one, other) in enumerate(zip(*traces, strict=True)):
        assert one.keys() == other.keys()
        different += [f"step {step}: {n}" for n, value in one.items() if not _same(value, other[n])]
    return different


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
